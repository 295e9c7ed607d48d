{{/* How many gateways: by requests in flight and by time in the queue, never by how busy a GPU is. Called with the root. */}}

{{/*
The gateways' number. Under an autoscaler the one that there is: left out, the API server would take 1 on the upgrade that turns
it on, and another number would undo what it did. Where nothing can be looked up (`helm template`), or is there: the fewest.
*/}}
{{- define "penstock.gateway.replicas" -}}
{{- if eq .Values.autoscaling.mode "none" -}}
{{ .Values.gateway.replicas }}
{{- else -}}
{{- $name := include "penstock.componentName" (dict "root" . "component" "gateway") -}}
{{- $present := lookup "apps/v1" "Deployment" .Release.Namespace $name -}}
{{ dig "spec" "replicas" .Values.autoscaling.minReplicas ($present | default dict) }}
{{- end -}}
{{- end -}}

{{/*
Series of this release's gateways, however Prometheus found them: by the namespace, and by the names that a Deployment
gives its pods.
*/}}
{{- define "penstock.autoscaling.pods" -}}
namespace="{{ .Release.Namespace }}",pod=~"{{ include "penstock.componentName" (dict "root" . "component" "gateway") }}-[a-z0-9]+-[a-z0-9]+"
{{- end -}}

{{/*
KEDA's questions, each the sum over the gateways, which AverageValue divides by their number. Empty where nothing is
scraped: that is an error, and no load of nought.
*/}}
{{- define "penstock.autoscaling.inflightQuery" -}}
sum(penstock_inflight_requests{ {{- include "penstock.autoscaling.pods" . -}} })
{{- end -}}

{{/* Seconds of queue a request over two minutes, of each gateway; 0 of one that nobody asked. */}}
{{- define "penstock.autoscaling.queueQuery" -}}
{{- $pods := include "penstock.autoscaling.pods" . -}}
sum(sum by (pod) (rate(penstock_queue_seconds_sum{ {{- $pods -}} }[2m])) / (sum by (pod) (rate(penstock_queue_seconds_count{ {{- $pods -}} }[2m])) > 0) or 0 * sum by (pod) (penstock_inflight_requests{ {{- $pods -}} }))
{{- end -}}

{{/* Up at once, to twice as many in half a minute; down slowly, one by one, since each one that goes is drained. */}}
{{- define "penstock.autoscaling.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 30}
    - {type: Pods, value: 2, periodSeconds: 30}
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}

{{/* Fails with one sentence where autoscaling asks for what cannot scale. */}}
{{- define "penstock.autoscaling.validate" -}}
{{- $auto := .Values.autoscaling -}}
{{- if ne $auto.mode "none" -}}
{{- if gt (int $auto.minReplicas) (int $auto.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %d and maxReplicas %d: the first may not be the larger" (int $auto.minReplicas) (int $auto.maxReplicas)) -}}
{{- end -}}
{{- $most := int (get .Values.gateway.settings "max_inflight_requests" | default 1024) -}}
{{- if gt (int $auto.targets.inflightRequests) $most -}}
{{- fail (printf "autoscaling.targets.inflightRequests is %d, but a gateway refuses requests from %d in flight on (max_inflight_requests), so that it would never scale: set it well below" (int $auto.targets.inflightRequests) $most) -}}
{{- end -}}
{{- if and (eq $auto.mode "keda") (not $auto.keda.prometheusAddress) -}}
{{- fail "autoscaling.mode is keda, but autoscaling.keda.prometheusAddress is empty: say where Prometheus is, such as http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
{{- end -}}
{{- end -}}
