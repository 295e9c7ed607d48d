{{/* dict root, component, maxUnavailable: how many of a component's pods may be taken away at once. */}}
{{- define "penstock.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "penstock.componentName" . | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  # A pod that is not ready serves nobody, and holds up no node.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "penstock.selectorLabels" . | nindent 6 }}
{{- end -}}
