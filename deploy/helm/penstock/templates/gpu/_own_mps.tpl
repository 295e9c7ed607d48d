{{/* What clients of this chart's own MPS daemon get. Each is called with the root, and emits nothing elsewhere. */}}

{{- define "penstock.mps.pipes" -}}
/run/penstock/mps
{{- end -}}

{{- define "penstock.mps.namespace" -}}
{{ .Values.gpu.sharing.own.namespace | default .Release.Namespace }}
{{- end -}}

{{/* The volume is no part of the namespace, so that its name tells releases of several apart. */}}
{{- define "penstock.mps.volumeName" -}}
{{ printf "%s-%s" .Release.Namespace (include "penstock.componentName" (dict "root" . "component" "mps")) }}
{{- end -}}

{{/* Items of env: which cards, and where the daemon is. Also the daemon's own. */}}
{{- define "penstock.gpu.env" -}}
{{- if include "penstock.gpu.hasOwnMps" . -}}
- name: NVIDIA_VISIBLE_DEVICES
  value: {{ .Values.gpu.sharing.own.visibleDevices | quote }}
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
- name: CUDA_MPS_PIPE_DIRECTORY
  value: {{ include "penstock.mps.pipes" . }}
{{- end -}}
{{- end -}}

{{- define "penstock.gpu.volumes" -}}
{{- if include "penstock.gpu.hasOwnMps" . -}}
- name: mps
  persistentVolumeClaim:
    claimName: {{ include "penstock.componentName" (dict "root" . "component" "mps") | quote }}
{{- end -}}
{{- end -}}

{{/* Read-only: clients only connect, and one that could write might take the daemon's socket away from the others. */}}
{{- define "penstock.gpu.volumeMounts" -}}
{{- if include "penstock.gpu.hasOwnMps" . -}}
- name: mps
  mountPath: {{ include "penstock.mps.pipes" . }}
  readOnly: true
{{- end -}}
{{- end -}}

{{/* For a gateway in the pod of a client, which tells whether the daemon is there (penstock_mps_up): env, volumeMounts. */}}
{{- define "penstock.mps.watchEnv" -}}
{{- if and (eq .Values.topology "sidecar") (include "penstock.gpu.hasOwnMps" .) -}}
- name: CUDA_MPS_PIPE_DIRECTORY
  value: {{ include "penstock.mps.pipes" . }}
{{- end -}}
{{- end -}}

{{- define "penstock.mps.watchMounts" -}}
{{- if eq .Values.topology "sidecar" }}{{ include "penstock.gpu.volumeMounts" . }}{{ end -}}
{{- end -}}

{{/* Items of initContainers, before Triton: CUDA that finds no daemon takes the card without MPS and says nothing. */}}
{{- define "penstock.gpu.initContainers" -}}
{{- if include "penstock.gpu.hasOwnMps" . -}}
- name: wait-for-mps
  image: {{ include "penstock.gateway.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -c, "until /opt/penstock/deploy/mps/healthy.sh; do echo 'no MPS daemon on this node yet'; sleep 2; done"]
  env:
    {{- include "penstock.gpu.env" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 128Mi}
  securityContext:
    {{- include "penstock.containerSecurityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "penstock.gpu.volumeMounts" . | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* Items of the daemon's env: what each client gets of a card. */}}
{{- define "penstock.mps.limits" -}}
{{- $own := .Values.gpu.sharing.own -}}
- name: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
  value: {{ $own.activeThreadPercentage | quote }}
- name: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT
  value: {{ $own.pinnedMemoryLimit | quote }}
{{- end -}}
