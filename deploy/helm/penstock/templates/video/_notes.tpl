{{/* Paragraphs of NOTES, or nothing. Called with the root. */}}
{{- define "penstock.video.notes" -}}
{{- if .Values.video.enabled -}}
{{- $name := include "penstock.componentName" (dict "root" . "component" "video") -}}
Video: {{ .Values.video.shards }} shard(s); a source belongs to one of them by its name. Their control APIs, with the key of {{ .Values.video.apiKeySecret }}:
    http://{{ $name }}-0.{{ $name }}.{{ .Release.Namespace }}:8010
  One shard more takes its part of the sources from the others, and no other source moves. While the pods are replaced, one by
  one from the last, a source that moves may be read twice or not at all. Results of a shard that is gone stay on its claim.
{{- end -}}
{{- end -}}
