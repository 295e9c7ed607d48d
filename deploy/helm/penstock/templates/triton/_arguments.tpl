{{/* dict root, isSidecar: tritonserver's arguments. It loads its models itself; later ones, and new versions, are loaded on request.
Where nobody loaded any, a gateway with an engine elsewhere would be ready and serve nothing. One broken model ends nobody. */}}
{{- define "penstock.triton.args" -}}
{{- $root := .root -}}
- --model-repository={{ include "penstock.models.repository" $root | default "/opt/penstock/model_repository" }}
- --model-control-mode=explicit
{{- range $root.Values.gateway.models | default (list "*") }}
- --load-model={{ . }}
{{- end }}
- --exit-on-error=false
{{- if .isSidecar }}
- --http-address=127.0.0.1
- --http-port=9000
- --grpc-address=127.0.0.1
- --grpc-port=9001
- --metrics-address=127.0.0.1
- --metrics-port=9002
- --exit-timeout-secs=5
{{- else }}
- --http-port=8000
- --grpc-port=8001
- --metrics-port=8002
- --exit-timeout-secs={{ $root.Values.triton.drain.graceSeconds }}
{{- end }}
- --http-thread-count=8
- --grpc-http2-max-ping-strikes=0
# The usual name, said so that the image removes what a Triton that was killed left in /dev/shm, which outlives its container.
- --backend-config=python,shm-region-prefix-name=triton_python_backend_shm_region_
{{- if include "penstock.triton.sharesSlab" . }}
- --allow-client-shm=true
{{- end }}
{{- range $root.Values.triton.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Releases before 26.04 take the gateway's memory without being told, and do not know the flag. */}}
{{- define "penstock.triton.sharesSlab" -}}
{{- $isOld := include "penstock.triton.isOlder" (dict "release" (include "penstock.triton.release" .root) "than" "26.04") -}}
{{- if and .isSidecar (not $isOld) (not (include "penstock.gpu.bringsShm" .root)) -}}
true
{{- end -}}
{{- end -}}

{{/* What the chart says itself, so that triton.args may not. */}}
{{- define "penstock.triton.ownArguments" -}}
model-repository model-store model-control-mode load-model http-address http-port grpc-address grpc-port metrics-address metrics-port
exit-timeout-secs exit-on-error allow-client-shm http-thread-count grpc-http2-max-ping-strikes
{{- end -}}
