{{/* Which Triton is taken: see server/penstock/gpu/triton_images.py for the reasons. */}}

{{- define "penstock.validate.triton" -}}
{{- $words := regexSplit `\s+` (include "penstock.triton.ownArguments" .) -1 -}}
{{- range .Values.triton.args -}}
{{- $name := regexReplaceAll `=.*` . "" | trimPrefix "--" -}}
{{- if has $name $words -}}
{{- fail (printf "triton.args holds --%s, which the chart says itself; leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- range .Values.triton.extraEnv -}}
{{- if hasPrefix "CUDA_MPS_" .name -}}
{{- fail (printf "triton.extraEnv names %s, which follows from gpu.sharing; leave it out" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.validate.release" -}}
{{- $triton := .Values.triton -}}
{{- if not (kindIs "string" $triton.release) -}}
{{- fail (printf "triton.release is %v, a number, of which YAML drops a last 0 (26.10 is 26.1): put it into quotes" $triton.release) -}}
{{- end -}}
{{- $ofTag := include "penstock.triton.tagRelease" . -}}
{{- if and $triton.image.digest (not $triton.release) (not $ofTag) -}}
{{- fail "triton.image.digest is set and says no release; set triton.release to the one that it is of" -}}
{{- else if and $triton.image.tag (not $ofTag) (not $triton.release) -}}
{{- fail (printf "triton.image.tag is %q, which does not end with a release such as -26.07; set triton.release to the one that it is of" $triton.image.tag) -}}
{{- else if and $ofTag $triton.release (ne $ofTag $triton.release) -}}
{{- fail (printf "triton.release is %s and triton.image.tag is %q; let both say the same" $triton.release $triton.image.tag) -}}
{{- end -}}
{{- $release := include "penstock.triton.release" . -}}
{{- include "penstock.validate.card" (dict "release" $release "generation" .Values.gpu.generation) -}}
{{- $isHoley := include "penstock.triton.isOlder" (dict "release" $release "than" "26.07") -}}
{{- if and $isHoley (not $triton.acceptKnownVulnerabilities) -}}
{{- $fix := "set triton.release to 26.07 or later, or triton.acceptKnownVulnerabilities to take it as it is" -}}
{{- if has .Values.gpu.generation (list "pascal" "volta") -}}
{{- $fix = printf "gpu.generation %s takes no later one, so set triton.acceptKnownVulnerabilities and let nothing but the gateway reach it" .Values.gpu.generation -}}
{{- end -}}
{{- fail (printf "Triton %s has known vulnerabilities (authentication bypass, path traversal), as have all releases before 26.07: whoever reaches its ports may do anything with it; %s" $release $fix) -}}
{{- end -}}
{{- end -}}

{{/* dict release, generation: whether the card takes it. */}}
{{- define "penstock.validate.card" -}}
{{- $last := get (dict "pascal" "24.04" "volta" "24.10") .generation -}}
{{- $why := get (dict "pascal" "later images bring TensorRT 10, which dropped Pascal" "volta" "later images ask for compute capability 7.5") .generation -}}
{{- if and $last (include "penstock.triton.isOlder" (dict "release" $last "than" .release)) -}}
{{- fail (printf "Triton %s does not take gpu.generation %s: %s; set triton.release to %s" .release .generation $why $last) -}}
{{- else if and (eq .generation "blackwell") (include "penstock.triton.isOlder" (dict "release" .release "than" "25.01")) -}}
{{- fail (printf "Triton %s does not take gpu.generation blackwell, which is supported from 25.01 on; set triton.release to 26.07" .release) -}}
{{- end -}}
{{- end -}}
