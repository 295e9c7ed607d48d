{{/* dict root, isSidecar: the container, alone in its pod or in the gateway's. */}}
{{- define "penstock.triton.container" -}}
{{- $root := .root -}}
- name: triton
  image: {{ include "penstock.triton.image" $root | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if .isSidecar }}
  restartPolicy: Always
  {{- end }}
  args:
    {{- include "penstock.triton.args" . | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
    {{- with include "penstock.gpu.env" $root }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $root.Values.triton.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if and (eq $root.Values.models.source "objectStore") $root.Values.models.objectStore.existingSecret }}
  envFrom:
    - secretRef: {name: {{ $root.Values.models.objectStore.existingSecret | quote }}}
  {{- end }}
  {{- include "penstock.triton.probes" . | nindent 2 }}
  securityContext:
    {{- include "penstock.containerSecurityContext" $root | nindent 4 }}
  resources:
    {{- include "penstock.triton.resources" $root | nindent 4 }}
  volumeMounts:
    - {name: triton-tmp, mountPath: /tmp}
    {{- if not (include "penstock.gpu.bringsShm" $root) }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- with include "penstock.models.volumeMounts" $root }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "penstock.gpu.volumeMounts" $root }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Live, and not ready: Triton answers once its models are loaded, and is never ready while one of them is broken. */}}
{{- define "penstock.triton.probes" -}}
{{- $seconds := .root.Values.triton.startupSeconds -}}
{{- if not .isSidecar -}}
ports:
  - {name: http, containerPort: 8000}
  - {name: grpc, containerPort: 8001}
  - {name: metrics, containerPort: 8002}
{{ end -}}
startupProbe:
  {{- include "penstock.triton.isLive" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div $seconds 5) }}
livenessProbe:
  {{- include "penstock.triton.isWell" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- if not .isSidecar }}
readinessProbe:
  {{- include "penstock.triton.isLive" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}
{{- end -}}

{{/* In the gateway's pod it listens on loopback, where the kubelet does not come. */}}
{{- define "penstock.triton.isLive" -}}
{{- if .isSidecar -}}
exec: {command: [curl, --silent, --fail, --max-time, "4", --output, /dev/null, "http://127.0.0.1:9000/v2/health/live"]}
{{- else -}}
httpGet: {path: /v2/health/live, port: http}
{{- end -}}
{{- end -}}

{{/* Beside its gateway also: whether that one's canary inferences come back. After an illegal memory access Triton lives on, and
answers every inference with an error; where the gateway does not answer, or drains, that says nothing of Triton. */}}
{{- define "penstock.triton.isWell" -}}
{{- if .isSidecar -}}
exec:
  command:
    - sh
    - -c
    - |
      curl --silent --fail --max-time 4 --output /dev/null http://127.0.0.1:9000/v2/health/live &&
        ! curl --silent --max-time 4 http://127.0.0.1:8000/v2/health/ready | grep --quiet 'canary inference'
{{- else -}}
{{ include "penstock.triton.isLive" . }}
{{- end -}}
{{- end -}}

{{- define "penstock.triton.resources" -}}
{{- $resources := deepCopy .Values.triton.resources -}}
{{- with include "penstock.gpu.resources" . | fromYaml -}}
{{- $_ := set $resources "limits" (merge . ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Without /dev/shm and the models, which it may share with a gateway. */}}
{{- define "penstock.triton.volumes" -}}
- name: triton-tmp
  emptyDir:
    sizeLimit: {{ .Values.triton.tmpSize }}
{{- with include "penstock.gpu.volumes" . }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "penstock.triton.initContainers" -}}
{{ include "penstock.gpu.initContainers" . | trim }}
{{ include "penstock.models.initContainers" . | trim }}
{{- end -}}
