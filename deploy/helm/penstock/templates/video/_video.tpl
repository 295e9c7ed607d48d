{{/* Fails where video asks for what cannot run. */}}
{{- define "penstock.video.validate" -}}
{{- end -}}
