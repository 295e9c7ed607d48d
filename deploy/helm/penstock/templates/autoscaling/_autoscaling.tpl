{{/* Fails where autoscaling asks for what cannot scale. */}}
{{- define "penstock.autoscaling.validate" -}}
{{- end -}}
