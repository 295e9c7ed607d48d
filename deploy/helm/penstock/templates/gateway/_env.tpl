{{/* What the gateway is told: PENSTOCK_NAME is a setting of `penstock up`, by its name. */}}

{{- define "penstock.gateway.env" -}}
{{- $gateway := .Values.gateway -}}
- {name: PENSTOCK_ENGINE, value: {{ include "penstock.gateway.engine" . | quote }}}
{{- with .Values.external.grpc }}
- {name: PENSTOCK_ENGINE_GRPC, value: {{ join "," . | quote }}}
{{- end }}
{{- if eq .Values.topology "bundled" }}
{{- with include "penstock.models.repository" . }}
- {name: PENSTOCK_MODEL_REPOSITORY, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- with $gateway.models }}
- {name: PENSTOCK_MODELS, value: {{ join "," . | quote }}}
{{- end }}
{{- with $gateway.batching }}
- {name: PENSTOCK_BATCHING, value: {{ include "penstock.gateway.batching" . | quote }}}
{{- end }}
- {name: PENSTOCK_HOME, value: /var/lib/penstock}
- {name: PENSTOCK_CONSOLE, value: "off"}
{{- if and .Values.console.enabled .Values.console.url }}
- {name: PENSTOCK_CONSOLE_URL, value: {{ .Values.console.url | quote }}}
{{- end }}
- {name: PENSTOCK_ANONYMOUS, value: {{ join "," $gateway.auth.anonymous | default "none" | quote }}}
- {name: PENSTOCK_ALLOWED_HOST, value: {{ include "penstock.gateway.allowedHosts" . | quote }}}
{{- if $gateway.auth.existingSecret }}
- {name: PENSTOCK_ACCESS_FILE, value: /etc/penstock/access/access.toml}
{{- end }}
- {name: PENSTOCK_DRAIN_DELAY_S, value: {{ $gateway.drain.delaySeconds | quote }}}
- {name: PENSTOCK_GRACE_S, value: {{ $gateway.drain.graceSeconds | quote }}}
- {name: PENSTOCK_LOG_FORMAT, value: {{ $gateway.logFormat | quote }}}
- {name: PENSTOCK_LOG_LEVEL, value: {{ $gateway.logLevel | quote }}}
{{- range $name, $value := include "penstock.gateway.settings" . | fromYaml }}
- {name: PENSTOCK_{{ upper $name }}, value: {{ include "penstock.text" $value | quote }}}
{{- end }}
{{- with include "penstock.mps.watchEnv" . }}
{{ . }}
{{- end }}
{{- with $gateway.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Host names that pods and the Ingress use for the gateway, and those in the values. An Ingress without a host accepts any name. */}}
{{- define "penstock.gateway.allowedHosts" -}}
{{- $service := include "penstock.componentName" (dict "root" . "component" "gateway") -}}
{{- $hosts := list -}}
{{- range list $service (printf "%s-headless" $service) -}}
{{- $inNamespace := printf "%s.%s" . $.Release.Namespace -}}
{{- $hosts = concat $hosts (list . $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace)) -}}
{{- end -}}
{{- with .Values.gateway.ingress -}}
{{- if .enabled -}}
{{- $hosts = append $hosts (.host | default "*") -}}
{{- end -}}
{{- end -}}
{{- join "," (concat $hosts .Values.gateway.auth.allowedHosts) -}}
{{- end -}}

{{/* auto would fall back to ONNX Runtime where a Triton should be. */}}
{{- define "penstock.gateway.engine" -}}
{{- if eq .Values.topology "bundled" -}}
triton
{{- else if eq .Values.topology "sidecar" -}}
http://127.0.0.1:9000
{{- else if eq .Values.topology "external" -}}
{{ join "," .Values.external.urls }}
{{- else -}}
{{- $service := include "penstock.componentName" (dict "root" . "component" "triton") -}}
{{- range $index := until (int .Values.triton.replicas) -}}
{{ if $index }},{{ end }}http://{{ $service }}-{{ $index }}.{{ $service }}:8000
{{- end -}}
{{- end -}}
{{- end -}}

{{/* {street: "gateway,slo_p99_ms=50", people: triton} as street=…;people=… */}}
{{- define "penstock.gateway.batching" -}}
{{- $words := list -}}
{{- range $model, $said := . -}}
{{- $words = append $words (printf "%s=%s" $model $said) -}}
{{- end -}}
{{- join ";" $words -}}
{{- end -}}

{{/* What is said, over what follows from the rest: a process sees the cores of its node, and not those it asked for. 0 goes by
the pod's own, too. */}}
{{- define "penstock.gateway.settings" -}}
{{- $own := dict -}}
{{- $cores := include "penstock.gateway.cores" . | int -}}
{{- if $cores -}}
{{- $own = dict "decoders" $cores "workers" (ternary 1 (min 8 (div $cores 4)) (lt $cores 8)) -}}
{{- end -}}
{{- $settings := merge (deepCopy .Values.gateway.settings) $own -}}
{{- if and (eq .Values.topology "sidecar") (include "penstock.gpu.bringsShm" .) -}}
{{- $_ := set $settings "slab_bytes" 0 -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Whole cores of the gateway, rounded up: its limit, else what it asks for; 0 where neither is said. */}}
{{- define "penstock.gateway.cores" -}}
{{- $resources := .Values.gateway.resources -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "0" $resources) $resources | toString -}}
{{- if hasSuffix "m" $cpu -}}
{{- divf (trimSuffix "m" $cpu) 1000 | ceil -}}
{{- else -}}
{{- ceil $cpu -}}
{{- end -}}
{{- end -}}
