{{/* Host names that browsers use for the console: of its Service, of console.url, and those in the values. */}}
{{- define "penstock.console.allowedHosts" -}}
{{- $service := include "penstock.componentName" (dict "root" . "component" "console") -}}
{{- $inNamespace := printf "%s.%s" $service .Release.Namespace -}}
{{- $hosts := list $service $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace) -}}
{{- with .Values.console.url -}}
{{- $hosts = append $hosts (regexReplaceAll `:[0-9]+$` (get (urlParse .) "host") "") -}}
{{- end -}}
{{- join "," (concat $hosts .Values.console.allowedHosts) -}}
{{- end -}}

{{/* Lines of NOTES. Called with the root. */}}
{{- define "penstock.console.notes" -}}
{{- if .Values.console.enabled -}}
{{- $name := include "penstock.componentName" (dict "root" . "component" "console") -}}
The console, for browsers:

    kubectl -n {{ .Release.Namespace }} port-forward service/{{ $name }} 8003      # then http://localhost:8003/

A browser does what its key may do; without a key, what anonymous callers may do.
{{- end -}}
{{- end -}}
