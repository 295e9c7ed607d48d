{{/* Where Triton's model repository comes from. What serves models mounts `models` at /models, read-only. */}}

{{/* Path or URL of the repository, for Triton and for the gateway that brings Triton along. Empty: the image's own. */}}
{{- define "penstock.models.repository" -}}
{{- $models := .Values.models -}}
{{- if eq $models.source "objectStore" -}}
{{ $models.objectStore.url }}
{{- else if eq $models.source "pvc" -}}
{{ printf "/models/%s" (trimPrefix "/" $models.pvc.path) | trimSuffix "/" }}
{{- else if has $models.source (list "ociImage" "git") -}}
/models/repository
{{- end -}}
{{- end -}}

{{- define "penstock.models.volumes" -}}
{{- $models := .Values.models -}}
{{- if eq $models.source "pvc" -}}
- name: models
  persistentVolumeClaim:
    claimName: {{ $models.pvc.claimName | quote }}
    readOnly: true
{{- else if has $models.source (list "ociImage" "git") -}}
- name: models
  emptyDir:
    sizeLimit: {{ $models.size }}
{{- end }}
{{- if eq $models.source "git" }}
- name: models-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- end }}
{{- end -}}

{{- define "penstock.models.volumeMounts" -}}
{{- if has .Values.models.source (list "pvc" "ociImage" "git") -}}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end -}}

{{/* Items of initContainers that fill the volume. A second run, after a restart, does the same again. */}}
{{- define "penstock.models.initContainers" -}}
{{- if eq .Values.models.source "ociImage" -}}
{{ include "penstock.models.fromImage" . }}
{{- else if eq .Values.models.source "git" -}}
{{ include "penstock.models.fromGit" . }}
{{- end -}}
{{- end -}}

{{- define "penstock.models.fromImage" -}}
- name: models
  image: {{ .Values.models.ociImage.reference | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  # Without a shell; the image has cp, and the path goes to it as it is.
  command: [cp, -R, --, {{ printf "%s/." (trimSuffix "/" .Values.models.ociImage.path) | quote }}, /models/repository]
  {{- include "penstock.models.container" . | nindent 2 }}
  volumeMounts:
    - {name: models, mountPath: /models}
{{- end -}}

{{/* What the values say reaches the shell as variables only, quoted, after --. */}}
{{- define "penstock.models.fromGit" -}}
- name: models
  image: {{ .Values.models.git.image | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -euc]
  args:
    - |
      rm -rf /models/clone /models/repository
      git init --quiet /models/clone
      cd /models/clone
      git -c credential.helper='!f() { echo "username=${GIT_USERNAME:-}"; echo "password=${GIT_PASSWORD:-}"; }; f' \
        fetch --quiet --depth 1 -- "$GIT_REPOSITORY" "$GIT_REF"
      git checkout --quiet --detach FETCH_HEAD
      rm -rf .git
      mv -- "/models/clone/$GIT_PATH" /models/repository
      rm -rf /models/clone
  env:
    - {name: HOME, value: /tmp}
    - {name: GIT_TERMINAL_PROMPT, value: "0"}
    - {name: GIT_ALLOW_PROTOCOL, value: https}
    - {name: GIT_REPOSITORY, value: {{ .Values.models.git.repository | quote }}}
    - {name: GIT_REF, value: {{ .Values.models.git.ref | toString | quote }}}
    - {name: GIT_PATH, value: {{ .Values.models.git.path | trimPrefix "/" | quote }}}
    {{- with .Values.models.git.existingSecret }}
    - {name: GIT_USERNAME, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: username}}}
    - {name: GIT_PASSWORD, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: password}}}
    {{- end }}
  {{- include "penstock.models.container" . | nindent 2 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: models-tmp, mountPath: /tmp}
{{- end -}}

{{- define "penstock.models.container" -}}
securityContext:
  {{- include "penstock.containerSecurityContext" . | nindent 2 }}
resources:
  requests: {cpu: 100m, memory: 256Mi}
  limits: {memory: 1Gi}
{{- end -}}
