{{/* dict root, component, values (nodeSelector, tolerations, affinity, …), hasCard: on which nodes a pod may be. */}}
{{- define "penstock.placement" -}}
{{- $spec := dict -}}
{{- if .hasCard -}}
{{- $spec = include "penstock.gpu.podSpec" .root | fromYaml -}}
{{- end -}}
{{- with merge (deepCopy .values.nodeSelector) ($spec.nodeSelector | default dict) -}}
{{- $_ := set $spec "nodeSelector" . -}}
{{- end -}}
{{- with concat ($spec.tolerations | default list) .values.tolerations -}}
{{- $_ := set $spec "tolerations" . -}}
{{- end -}}
{{- range $name := list "affinity" "priorityClassName" -}}
{{- with get $.values $name -}}
{{- $_ := set $spec $name . -}}
{{- end -}}
{{- end -}}
{{- with $spec }}
{{- toYaml . }}
{{- end }}
{{ include "penstock.topologySpread" (dict "root" .root "component" .component "constraint" .values.topologySpread) }}
{{- end -}}
