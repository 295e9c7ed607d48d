{{- define "penstock.gateway.container" -}}
- name: gateway
  image: {{ include "penstock.gateway.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  env:
    {{- include "penstock.gateway.env" . | nindent 4 }}
  ports:
    - {name: http, containerPort: 8000}
    - {name: grpc, containerPort: 8001}
    - {name: metrics, containerPort: 8002}
  # Listens. Live says no more, so a gateway whose engine is down or loads is left alone; ready says that models are served.
  startupProbe:
    httpGet: {path: /v2/health/live, port: http}
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: {{ max 1 (div .Values.gateway.startupSeconds 2) }}
  livenessProbe:
    httpGet: {path: /v2/health/live, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /v2/health/ready, port: http}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  {{- with .Values.gateway.drain.preStopSeconds }}
  lifecycle:
    preStop:
      # The sleep action is younger than Kubernetes 1.29.
      exec: {command: [sleep, {{ . | quote }}]}
  {{- end }}
  securityContext:
    {{- include "penstock.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- toYaml .Values.gateway.resources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /var/lib/penstock}
    - {name: shm, mountPath: /dev/shm}
    {{- with include "penstock.mps.watchMounts" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if .Values.gateway.auth.existingSecret }}
    # The folder, since a file that is mounted alone never changes.
    - {name: access, mountPath: /etc/penstock/access, readOnly: true}
    {{- end }}
    {{- with and (eq .Values.topology "bundled") (include "penstock.models.volumeMounts" .) }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The volumes of its pod, with those of a Triton that is in it. */}}
{{- define "penstock.gateway.volumes" -}}
# Triton's backends are laid out and started in /tmp.
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.gateway.tmpSize }}
- name: home
  emptyDir:
    sizeLimit: {{ .Values.gateway.homeSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.gateway.shmSize }}
{{- with .Values.gateway.auth.existingSecret }}
- name: access
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with and (has .Values.topology (list "bundled" "sidecar")) (include "penstock.models.volumes" .) }}
{{ . }}
{{- end }}
{{- if eq .Values.topology "sidecar" }}
{{ include "penstock.triton.volumes" . }}
{{- end }}
{{- end -}}

{{/* What runs before it. A Triton in its pod is a native sidecar: it starts before the gateway and ends after it. */}}
{{- define "penstock.gateway.initContainers" -}}
{{- if eq .Values.topology "bundled" -}}
{{ include "penstock.models.initContainers" . }}
{{- else if eq .Values.topology "sidecar" -}}
{{ include "penstock.triton.initContainers" . }}
{{ include "penstock.triton.container" (dict "root" . "isSidecar" true) }}
{{- end -}}
{{- end -}}
