{{/* Images, and which release of NVIDIA's a Triton is. */}}

{{/* dict root, image and, where its own are empty, repository and tag: what a container runs. A digest wins. */}}
{{- define "penstock.image" -}}
{{- $repository := .image.repository | default .repository -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{- $repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .tag | default (include "penstock.tag" .root) }}{{ end -}}
{{- end -}}

{{- define "penstock.tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "penstock.gateway.image" -}}
{{- $repository := ternary "penstock" "penstock-gateway" (eq .Values.topology "bundled") -}}
{{ include "penstock.image" (dict "root" . "image" .Values.gateway.image "repository" $repository) }}
{{- end -}}

{{- define "penstock.triton.image" -}}
{{- $tag := printf "%s-%s" (include "penstock.tag" .) (include "penstock.triton.release" .) -}}
{{ include "penstock.image" (dict "root" . "image" .Values.triton.image "tag" $tag) }}
{{- end -}}

{{/* NVIDIA's release, such as 26.07: as said, else as the tag says, else the newest that the card takes and we know. */}}
{{- define "penstock.triton.release" -}}
{{- .Values.triton.release | toString | default (include "penstock.triton.tagRelease" .) | default (include "penstock.triton.newest" .) -}}
{{- end -}}

{{/* The release that the tag ends with, -py3 or not; empty where it names none. */}}
{{- define "penstock.triton.tagRelease" -}}
{{- regexFind `(^|-)[0-9]{2}\.[0-9]{2}(-py3)?$` .Values.triton.image.tag | trimPrefix "-" | trimSuffix "-py3" -}}
{{- end -}}

{{/* As server/penstock/gpu/triton_images.py has it, which says why. */}}
{{- define "penstock.triton.newest" -}}
{{- get (dict "pascal" "24.04" "volta" "24.10") .Values.gpu.generation | default "26.07" -}}
{{- end -}}

{{/* dict release, than: "true" where the release is older. Both look like 26.07, so that their texts compare. */}}
{{- define "penstock.triton.isOlder" -}}
{{- if lt .release .than }}true{{ end -}}
{{- end -}}
