{{/* Lines of NOTES. Called with the root. */}}

{{/* What to ask first: with a key where one is wanted, and a model that there is. street is an image's own; of other repositories
the chart knows the names that gateway.models has. */}}
{{- define "penstock.gateway.firstQuestion" -}}
{{- $anonymous := .Values.gateway.auth.anonymous -}}
{{- $models := .Values.gateway.models -}}
{{- $key := ternary "" ` -H "x-api-key: $KEY"` (and (has "infer" $anonymous) (has "read" $anonymous)) -}}
{{- $isOurs := and (eq .Values.models.source "image") (ne .Values.topology "external") -}}
{{- $model := "NAME" -}}
{{- if and $isOurs (or (not $models) (has "street" $models)) -}}
{{- $model = "street" -}}
{{- else if $models -}}
{{- $model = first $models -}}
{{- end -}}
{{- if $key }}
    KEY=…    # of gateway.auth.existingSecret, with the roles infer and read
{{- end }}
{{- if eq $model "NAME" }}
    curl -X POST localhost:8000/v2/repository/index{{ $key }}
{{- end }}
    curl localhost:8000/v2/models/{{ $model }}/image --data-binary @photo.jpg -H 'content-type: image/jpeg'{{ $key }}
{{- end -}}
