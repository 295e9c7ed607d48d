{{/* Paragraphs of NOTES, or nothing. Called with the root. */}}
{{- define "penstock.monitoring.notes" -}}
{{- $monitoring := .Values.monitoring -}}
{{- if or $monitoring.serviceMonitor.enabled $monitoring.rules.enabled -}}
Monitoring: ServiceMonitors and PrometheusRules need the Prometheus operator's CRDs, which this chart does not install; the
  operator takes those whose labels it looks for (monitoring.serviceMonitor.labels, monitoring.rules.labels).
{{- end -}}
{{- end -}}
