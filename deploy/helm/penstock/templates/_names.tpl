{{/* Names, labels and what every pod of the chart has alike. */}}

{{/*
Prefix of every object's name: a DNS label that begins with a letter, as a Service's name must. Dots of the release's name
become dashes, and a name that begins with a digit gets the chart's name in front.
Short enough for the suffix -gateway-headless and the suffix of a pod.
*/}}
{{- define "penstock.fullname" -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- if regexMatch `^[0-9]` $release -}}
{{- $release = printf "%s-%s" .Chart.Name $release -}}
{{- end -}}
{{- $name := ternary $release (printf "%s-%s" $release .Chart.Name) (contains .Chart.Name $release) -}}
{{- trunc 40 $name | trimSuffix "-" -}}
{{- end -}}

{{/* dict root, component: the name of that component's objects. */}}
{{- define "penstock.componentName" -}}
{{- include "penstock.fullname" .root }}-{{ .component }}
{{- end -}}

{{/* dict root, component: what never changes of a component's labels. */}}
{{- define "penstock.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{/* dict root, component: all labels of an object. */}}
{{- define "penstock.labels" -}}
{{ include "penstock.podLabels" (dict "root" .root "component" .component) }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* dict root, component, extra: metadata.labels of a pod, which a new chart of the same version of the app leaves alone.
extra: what the values add. */}}
{{- define "penstock.podLabels" -}}
{{ include "penstock.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
app.kubernetes.io/part-of: penstock
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "penstock.serviceAccountName" -}}
{{ .Values.serviceAccount.existing | default (include "penstock.fullname" .) }}
{{- end -}}

{{/* Lines of every pod's spec. Service links would be PENSTOCK_… variables, which the programs take for settings. */}}
{{- define "penstock.podSpec" -}}
serviceAccountName: {{ include "penstock.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "penstock.pullSecrets" . }}
{{ . }}
{{- end }}
securityContext:
  {{- include "penstock.podSecurityContext" . | nindent 2 }}
{{- end -}}

{{/* Names, or {name: …} as a pod has them. */}}
{{- define "penstock.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ if kindIs "map" . }}{{ quote .name }}{{ else }}{{ quote . }}{{ end }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "penstock.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "penstock.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* dict root, component, constraint: a pod's spread over nodes and zones; nothing where there is no constraint. */}}
{{- define "penstock.topologySpread" -}}
{{- if .constraint -}}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $.constraint }}
    labelSelector:
      matchLabels:
        {{- include "penstock.selectorLabels" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A size such as 1Gi or 500M in bytes. */}}
{{- define "penstock.bytes" -}}
{{- $factors := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $unit := regexFind `[A-Za-z]+$` . -}}
{{- mul (trimSuffix $unit . | int64) (get $factors $unit | default 1 | int64) -}}
{{- end -}}

{{/* A number or a word as the text of a variable: 16777216, and not 1.6777216e+07; a list with commas. */}}
{{- define "penstock.text" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}
