{{/* Fails with one sentence where gpu asks for what no card, plugin or daemon gives; the topology is looked at before. Called with the root. */}}
{{- define "penstock.gpu.validate" -}}
{{- include "penstock.gpu.validateResources" . -}}
{{- if include "penstock.gpu.isUsed" . -}}
{{- include "penstock.gpu.validateMig" . -}}
{{- include "penstock.gpu.validateShares" . -}}
{{- include "penstock.gpu.validateMps" . -}}
{{- include "penstock.gpu.validateOwnMps" . -}}
{{- else -}}
{{- include "penstock.gpu.validateNoGpu" . -}}
{{- end -}}
{{- end -}}

{{/* A card that is asked for there would be gpu.count's, or taken from Triton. */}}
{{- define "penstock.gpu.validateResources" -}}
{{- range $component := list "gateway" "triton" "video" -}}
{{- range $kind, $amounts := get (get $.Values $component) "resources" -}}
{{- range $name, $amount := $amounts -}}
{{- if or (hasPrefix "nvidia.com/" $name) (eq $name $.Values.gpu.resourceName) -}}
{{- fail (printf "%s.resources.%s has %s: cards are Triton's, as gpu says, and the video program's, as video.gpu does; set gpu.generation and gpu.count (gpu.mig.profile for a slice), or video.gpu.enabled, and leave it out" $component $kind $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.gpu.validateNoGpu" -}}
{{- $say := "but gpu.generation is none: say which card it is, such as gpu.generation=turing" -}}
{{- if ne .Values.gpu.sharing.mode "none" -}}
{{- fail (printf "gpu.sharing.mode is %s, %s" .Values.gpu.sharing.mode $say) -}}
{{- end -}}
{{- with .Values.gpu.mig.profile }}{{ fail (printf "gpu.mig.profile is %s, %s" . $say) }}{{ end -}}
{{- end -}}

{{- define "penstock.gpu.validateMig" -}}
{{- $gpu := .Values.gpu -}}
{{- with $gpu.mig.profile -}}
{{- if has $gpu.generation (list "pascal" "volta" "turing" "ada") -}}
{{- fail (printf "gpu.mig.profile is %s, but cards of generation %s have no MIG (those of ampere, hopper and blackwell for data centres do): leave it empty" . $gpu.generation) -}}
{{- end -}}
{{- if eq $gpu.sharing.mode "mps" -}}
{{- if eq $gpu.sharing.provider "own" -}}
{{- fail (printf "gpu.mig.profile is %s, but clients of the own MPS daemon ask for no resource: leave it empty, and name the instance in gpu.sharing.own.visibleDevices" .) -}}
{{- end -}}
{{- fail (printf "gpu.mig.profile is %s, but NVIDIA's device plugin shares no MIG instance by MPS: use gpu.sharing.mode=time-slicing, or none" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.gpu.validateShares" -}}
{{- $gpu := .Values.gpu -}}
{{- if and (ne $gpu.sharing.mode "none") (gt (int $gpu.count) 1) -}}
{{- fail (printf "gpu.count is %d, but with gpu.sharing.mode %s a Triton gets a share of one card: set gpu.count to 1 and run more Tritons" (int $gpu.count) $gpu.sharing.mode) -}}
{{- end -}}
{{- end -}}

{{/* 48 clients of one server from Volta on (60 with a driver of CUDA 13.1, which the chart cannot know), 16 before. */}}
{{- define "penstock.gpu.validateMps" -}}
{{- $gpu := .Values.gpu -}}
{{- if eq $gpu.sharing.mode "mps" -}}
{{- $isOwn := eq $gpu.sharing.provider "own" -}}
{{- if and (eq $gpu.generation "pascal") (not $isOwn) -}}
{{- fail "gpu.sharing.provider is device-plugin, but the plugin limits each client's memory and threads, which MPS cannot on pascal: use gpu.sharing.provider=own, or gpu.sharing.mode=time-slicing" -}}
{{- end -}}
{{- $most := ternary 16 48 (or (eq $gpu.generation "pascal") (and (eq $gpu.generation "volta") (not $isOwn))) -}}
{{- $why := ternary "the plugin counts cards below compute capability 7.5 as older than Volta" "one MPS server takes no more" (and (eq $gpu.generation "volta") (not $isOwn)) -}}
{{- if gt (int $gpu.sharing.replicas) $most -}}
{{- fail (printf "gpu.sharing.replicas is %d, but on %s at most %d clients share a card (%s): set it to %d or less" (int $gpu.sharing.replicas) $gpu.generation $most $why $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.gpu.validateOwnMps" -}}
{{- if include "penstock.gpu.hasOwnMps" . -}}
{{- $gpu := .Values.gpu -}}
{{- $own := $gpu.sharing.own -}}
{{- if not $gpu.nodeSelector -}}
{{- fail "gpu.sharing.provider is own, but gpu.nodeSelector is empty: label the nodes whose cards the daemon may share, and name the label there" -}}
{{- end -}}
{{- if eq $gpu.generation "pascal" -}}
{{- range $name, $limit := dict "activeThreadPercentage" (int $own.activeThreadPercentage) "pinnedMemoryLimit" $own.pinnedMemoryLimit -}}
{{- if $limit }}{{ fail (printf "gpu.sharing.own.%s is %v, but MPS has no limits on pascal: leave it out" $name $limit) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- include "penstock.gpu.validateClients" . -}}
{{- end -}}
{{- end -}}

{{/* By the device plugin Kubernetes counts the shares; of our own daemon's clients nobody does. */}}
{{- define "penstock.gpu.validateClients" -}}
{{- $tritons := int .Values.triton.replicas -}}
{{- $name := "triton.replicas" -}}
{{- if eq .Values.topology "sidecar" -}}
{{- $tritons = int .Values.gateway.replicas -}}
{{- $name = "gateway.replicas" -}}
{{- if ne .Values.autoscaling.mode "none" -}}
{{- $tritons = int .Values.autoscaling.maxReplicas -}}
{{- $name = "autoscaling.maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- if gt $tritons (int .Values.gpu.sharing.replicas) -}}
{{- fail (printf "%s is %d, but gpu.sharing.replicas says that %d Tritons share the cards of the own MPS daemon, and nothing else counts them: lower the one or raise the other" $name $tritons (int .Values.gpu.sharing.replicas)) -}}
{{- end -}}
{{- end -}}
