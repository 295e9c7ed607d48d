{{/* The video program's own settings. Each is called with the root. */}}

{{/* PENSTOCK_HOME of the image. */}}
{{- define "penstock.video.folder" -}}
/var/lib/penstock
{{- end -}}

{{- define "penstock.video.gatewayUrl" -}}
{{- $default := printf "http://%s:8000" (include "penstock.componentName" (dict "root" . "component" "gateway")) -}}
{{ .Values.video.gatewayUrl | default $default | trimSuffix "/" }}
{{- end -}}

{{/* The file of `penstock video run`: the values', with where to listen and who infers. */}}
{{- define "penstock.video.file" -}}
{{- $api := dict "host" "0.0.0.0" "port" 8010 -}}
{{- if .Values.video.allowOutbound -}}
{{- $_ := set $api "allow-outbound" .Values.video.allowOutbound -}}
{{- end -}}
{{- $engine := dict "gateway" (include "penstock.video.gatewayUrl" .) -}}
{{- toYaml (merge (dict "api" $api "engine" $engine) .Values.video.config) -}}
{{- end -}}

{{/* What a card adds to the container's resources, and to the pod. */}}
{{- define "penstock.video.resources" -}}
{{- $resources := deepCopy .Values.video.resources -}}
{{- if .Values.video.gpu.enabled -}}
{{- $limits := merge (dict .Values.video.gpu.resourceName .Values.video.gpu.count) (get $resources "limits" | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "penstock.video.runtimeClassName" -}}
{{- if .Values.video.gpu.enabled }}{{ .Values.video.gpu.runtimeClassName }}{{ end -}}
{{- end -}}

{{- define "penstock.video.tolerations" -}}
{{- $ofCards := .Values.video.gpu.enabled | ternary .Values.gpu.tolerations list -}}
{{- toYaml (concat ($ofCards | default list) .Values.video.tolerations) -}}
{{- end -}}

{{/* Fails with one sentence where video asks for what cannot run. */}}
{{- define "penstock.video.validate" -}}
{{- $video := .Values.video -}}
{{- if $video.enabled -}}
{{- range list "api" "engine" -}}
{{- if hasKey $video.config . -}}
{{- fail (printf "video.config has %s, which the chart writes itself: leave it out (video.gatewayUrl says where the gateway is, video.apiKeySecret who may call the control API)" .) -}}
{{- end -}}
{{- end -}}
{{- if not (get (get $video.config "primary-gie" | default dict) "model") -}}
{{- fail "video.enabled is true, but video.config names no model: set video.config.primary-gie.model to one that the gateway serves, such as street" -}}
{{- end -}}
{{- if not $video.apiKeySecret -}}
{{- fail "video.apiKeySecret is empty, but the control API can be reached from other pods: name a Secret whose key api-key has 20 signs or more" -}}
{{- end -}}
{{- if lt (int $video.graceSeconds) 20 -}}
{{- fail (printf "video.graceSeconds is %d, but the program takes up to 15 s to finish what was decoded and then closes its sinks: set it to 20 or more" (int $video.graceSeconds)) -}}
{{- end -}}
{{- include "penstock.video.validateCard" . -}}
{{- include "penstock.video.validateAccess" . -}}
{{- include "penstock.video.validateVariables" . -}}
{{- end -}}
{{- end -}}

{{/* Pods share no memory of a card, and no card is there unless it was asked for. */}}
{{- define "penstock.video.validateCard" -}}
{{- $video := .Values.video -}}
{{- if eq (dig "gpu" "hand-over" "auto" $video.config | toString) "device" -}}
{{- fail "video.config.gpu.hand-over is device, but the engine is in another pod, and CUDA shares a card's memory inside one pod only: leave it at auto, or set host" -}}
{{- end -}}
{{- range $source := kindIs "slice" $video.config.source | ternary $video.config.source (list $video.config.source) -}}
{{- if and (kindIs "map" $source) (not $video.gpu.enabled) (eq (get $source "decoder" | toString) "nvdec") -}}
{{- fail (printf "video.config has the decoder nvdec for %s and video.gpu.enabled is false, so that no card is in the pod: set it to true, or the decoder to auto" (get $source "camera_id" | default "a source")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a Secret holds the chart cannot know; without one it knows every variable that there is. */}}
{{- define "penstock.video.validateVariables" -}}
{{- $known := list "PENSTOCK_VIDEO_API_KEY" "PENSTOCK_SHARD" "PENSTOCK_SHARDS" -}}
{{- range .Values.video.extraEnv -}}
{{- $known = append $known .name -}}
{{- end -}}
{{- if not .Values.video.existingSecret -}}
{{- range regexFindAll `\$\{[A-Za-z_][A-Za-z0-9_]*\}` (toYaml .Values.video.config) -1 -}}
{{- $name := trimAll "${}" . -}}
{{- if not (has $name $known) -}}
{{- fail (printf "video.config names ${%s}, which no variable of the pod is: name a Secret in video.existingSecret whose key %s has it, or set it in video.extraEnv" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The gateway of this release lets in who has a key, or whom gateway.auth.anonymous names. */}}
{{- define "penstock.video.validateAccess" -}}
{{- $anonymous := .Values.gateway.auth.anonymous -}}
{{- $isLetIn := and (has "infer" $anonymous) (has "read" $anonymous) -}}
{{- if and (not .Values.video.gatewayUrl) (not $isLetIn) (not .Values.video.existingSecret) -}}
{{- fail "video has no key for the gateway, which gateway.auth.anonymous does not let infer and read: name a Secret in video.existingSecret whose key PENSTOCK_API_KEY is one" -}}
{{- end -}}
{{- end -}}
