{{/* Pairs of values that cannot be. Each refusal is a sentence: what, with which value, what to do. Called by validate.yaml. */}}

{{- define "penstock.validate" -}}
{{- include "penstock.validate.images" . -}}
{{- include "penstock.validate.topology" . -}}
{{- include "penstock.validate.external" . -}}
{{- include "penstock.validate.models" . -}}
{{- include "penstock.validate.gateway" . -}}
{{- include "penstock.validate.memory" . -}}
{{- include "penstock.validate.network" . -}}
{{- include "penstock.gpu.validate" . -}}
{{- if has .Values.topology (list "sidecar" "separate") -}}
{{- include "penstock.validate.triton" . -}}
{{- include "penstock.validate.release" . -}}
{{- end -}}
{{- include "penstock.video.validate" . -}}
{{- include "penstock.autoscaling.validate" . -}}
{{- end -}}

{{/* The kubelet takes no other reference: InvalidImageName. A host and its port may be as they like. */}}
{{- define "penstock.validate.images" -}}
{{- $registry := .Values.image.registry -}}
{{- $path := regexReplaceAll `^[^/]*` $registry "" -}}
{{- if contains "://" $registry -}}
{{- fail (printf "image.registry is %s: an image's name has no scheme; leave out what stands before the host" $registry) -}}
{{- else if ne $path (lower $path) -}}
{{- fail (printf "image.registry is %s: behind the host an image's name has no capitals; write it small, and push it so" $registry) -}}
{{- end -}}
{{- end -}}

{{- define "penstock.validate.topology" -}}
{{- $generation := .Values.gpu.generation -}}
{{- if ne $generation "none" -}}
{{- if eq .Values.topology "bundled" -}}
{{- fail (printf "topology is bundled and gpu.generation is %s: the Triton of the image penstock has no GPU backends; set topology to sidecar or separate" $generation) -}}
{{- else if eq .Values.topology "external" -}}
{{- fail (printf "topology is external and gpu.generation is %s: no Triton of this release would use the card; set gpu.generation to none" $generation) -}}
{{- end -}}
{{- end -}}
{{- if and (ne .Values.topology "separate") (ne (int .Values.triton.replicas) 1) -}}
{{- fail (printf "triton.replicas is %d and topology is %s: only topology separate has Tritons of its own number; leave it at 1, and set gateway.replicas or the topology" (int .Values.triton.replicas) .Values.topology) -}}
{{- end -}}
{{- end -}}

{{- define "penstock.validate.external" -}}
{{- $urls := len .Values.external.urls -}}
{{- $grpc := len .Values.external.grpc -}}
{{- if and (eq .Values.topology "external") (not $urls) -}}
{{- fail "topology is external and external.urls is empty: name the Tritons' HTTP addresses, such as http://triton.ml:8000" -}}
{{- else if and (ne .Values.topology "external") (or $urls $grpc) -}}
{{- fail (printf "external.urls or external.grpc is set and topology is %s, which would not ask them; set topology to external, or leave them empty" .Values.topology) -}}
{{- else if and $grpc (ne $grpc $urls) -}}
{{- fail (printf "external.grpc names %d addresses for %d urls; give one for each, in the same order, or none" $grpc $urls) -}}
{{- else if ne $urls (len (uniq .Values.external.urls)) -}}
{{- fail "external.urls names an address twice; every Triton has an address of its own" -}}
{{- end -}}
{{- range .Values.external.urls -}}
{{- if not (regexMatch `^https?://` .) -}}
{{- fail (printf "external.urls names %s without a scheme: write http://%s" . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What each source needs; and what is said for a source that is not the one. */}}
{{- define "penstock.validate.models" -}}
{{- $models := .Values.models -}}
{{- if and (eq .Values.topology "external") (ne $models.source "image") -}}
{{- fail (printf "models.source is %s and topology is external: whoever runs those Tritons gives them their models; leave it at image" $models.source) -}}
{{- else if and (eq .Values.topology "bundled") (eq $models.source "objectStore") -}}
{{- fail "models.source is objectStore and topology is bundled: the Triton of the image penstock reads folders only; set topology to sidecar or separate, or another source" -}}
{{- end -}}
{{- $needed := dict "pvc" (list "claimName") "objectStore" (list "url") "ociImage" (list "reference") "git" (list "repository" "ref" "image") -}}
{{- range $source, $names := $needed -}}
{{- range $name := $names -}}
{{- $said := get (get $models $source) $name -}}
{{- if and (eq $models.source $source) (not $said) -}}
{{- fail (printf "models.source is %s and models.%s.%s is empty; set it" $source $source $name) -}}
{{- else if and (ne $models.source $source) $said -}}
{{- fail (printf "models.%s.%s is %q and models.source is %s, which does not read it; set models.source to %s, or leave it empty" $source $name (toString $said) $models.source $source) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.validate.gateway" -}}
{{- $auth := .Values.gateway.auth -}}
{{- if not (or $auth.anonymous $auth.existingSecret) -}}
{{- fail "gateway.auth.anonymous and gateway.auth.existingSecret are empty: nobody could ask anything; name a Secret with keys, or what callers without a key may do" -}}
{{- end -}}
{{- range .Values.gateway.extraEnv -}}
{{- if hasPrefix "PENSTOCK_" .name -}}
{{- fail (printf "gateway.extraEnv names %s: settings go into gateway.settings, keys into the Secret of gateway.auth.existingSecret" .name) -}}
{{- end -}}
{{- end -}}
{{- $monitor := .Values.monitoring.serviceMonitor -}}
{{- if and $monitor.enabled .Values.gateway.settings.metrics_key_required (not $monitor.apiKeySecret) -}}
{{- fail "gateway.settings.metrics_key_required is true and monitoring.serviceMonitor.apiKeySecret is empty: Prometheus would get 401; name a Secret with an API key that has the role read, under api-key" -}}
{{- end -}}
{{- $slab := int64 (.Values.gateway.settings.slab_bytes | default 0) -}}
{{- if and (has .Values.topology (list "bundled" "sidecar")) (gt $slab (include "penstock.bytes" .Values.gateway.shmSize | int64)) -}}
{{- fail (printf "gateway.settings.slab_bytes is %d and gateway.shmSize is %s: the slab lies in that memory; set shmSize higher" $slab .Values.gateway.shmSize) -}}
{{- end -}}
{{- if and .Values.gateway.ingress.tlsSecret (not .Values.gateway.ingress.host) -}}
{{- fail (printf "gateway.ingress.tlsSecret is %s and gateway.ingress.host is empty: a certificate is of a name; set the host" .Values.gateway.ingress.tlsSecret) -}}
{{- end -}}
{{- end -}}

{{/* A memory-backed /dev/shm counts to the limit of who fills it. */}}
{{- define "penstock.validate.memory" -}}
{{- $names := list "gateway" -}}
{{- if eq .Values.topology "separate" }}{{ $names = append $names "triton" }}{{ end -}}
{{- if .Values.video.enabled }}{{ $names = append $names "video" }}{{ end -}}
{{- range $name := $names -}}
{{- $values := get $.Values $name -}}
{{- $limit := dig "limits" "memory" "" $values.resources | toString -}}
{{- if and (regexMatch `^[0-9]+([KMGT]i?)?$` $limit) (ge (include "penstock.bytes" $values.shmSize | int64) (include "penstock.bytes" $limit | int64)) -}}
{{- fail (printf "%s.shmSize is %s and %s.resources.limits.memory is %s: what lies in /dev/shm counts to that limit, so that the container would be killed before it is full; set the one lower or the other higher" $name $values.shmSize $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the policy would cut off without a word. */}}
{{- define "penstock.validate.network" -}}
{{- $policy := .Values.networkPolicy -}}
{{- if $policy.enabled -}}
{{- if not $policy.gatewayFrom -}}
{{- if .Values.gateway.ingress.enabled -}}
{{- fail "gateway.ingress.enabled is true and networkPolicy.gatewayFrom is empty: only pods of this namespace would reach the gateway; name the ingress controller's there, such as {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ingress-nginx}}}" -}}
{{- else if ne .Values.gateway.service.type "ClusterIP" -}}
{{- fail (printf "gateway.service.type is %s and networkPolicy.gatewayFrom is empty: only pods of this namespace would reach the gateway; say who else may, such as {ipBlock: {cidr: 10.0.0.0/8}}" .Values.gateway.service.type) -}}
{{- end -}}
{{- end -}}
{{- with and .Values.video.enabled (not $policy.egress) (include "penstock.validate.cameras" .) -}}
{{- fail (printf "video.config reads %s and networkPolicy.egress is empty: no camera could be reached; allow them, such as {to: [{ipBlock: {cidr: 10.20.0.0/16}}]}" .) -}}
{{- end -}}
{{- if and .Values.video.enabled .Values.video.gatewayUrl (not $policy.egress) -}}
{{- fail (printf "video.gatewayUrl is %s and networkPolicy.egress is empty: only the gateway of this release could be reached; allow that one, such as {to: [{ipBlock: {cidr: 10.20.0.0/16}}], ports: [{port: 8000}, {port: 8001}]}" .Values.video.gatewayUrl) -}}
{{- end -}}
{{- if and (has .Values.models.source (list "objectStore" "git")) (not $policy.egress) -}}
{{- fail (printf "models.source is %s and networkPolicy.egress is empty: the models could not be fetched; allow it, such as {ports: [{port: 443}]}" .Values.models.source) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Scheme and host of each source that is read over the network, without what may be a password. */}}
{{- define "penstock.validate.cameras" -}}
{{- $cameras := list -}}
{{- range .Values.video.config.source -}}
{{- $uri := kindIs "map" . | ternary (toString (get (kindIs "map" . | ternary . dict) "uri")) (toString .) -}}
{{- with regexFind `^(rtsps?|https?)://[^/]+` $uri -}}
{{- $cameras = append $cameras (regexReplaceAll `//.*@` . "//") -}}
{{- end -}}
{{- end -}}
{{- join ", " $cameras -}}
{{- end -}}
