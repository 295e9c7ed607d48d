{{/* Nobody cuts a card by asking for a piece of it. */}}
{{- define "penstock.gpu.migNotes" -}}
{{- with .Values.gpu.mig.profile -}}
MIG: instances of {{ . }} have to be there already (by the GPU operator's mig-manager or `nvidia-smi mig`; which profiles a card has:
  `nvidia-smi mig -lgip`), and NVIDIA's device plugin has to run with migStrategy=mixed. Until a node names them, pods are Pending:
    kubectl describe nodes | grep mig-{{ . }}
{{- end -}}
{{- end -}}

{{/* What an operator has still to do for GPUs; paragraphs of NOTES, or nothing. Called with the root. */}}
{{- define "penstock.gpu.notes" -}}
{{- $sharing := .Values.gpu.sharing -}}
{{- if include "penstock.gpu.hasOwnMps" . -}}
MPS: the DaemonSet {{ include "penstock.componentName" (dict "root" . "component" "mps") }} in namespace {{ include "penstock.mps.namespace" . }} runs the daemon on nodes with{{ range $key, $value := .Values.gpu.nodeSelector }} {{ $key }}={{ $value }}{{ end }}.
  Its namespace has to admit privileged pods (the node's process ids, a hostPath):
    kubectl label namespace {{ include "penstock.mps.namespace" . }} pod-security.kubernetes.io/enforce=privileged
  Its Tritons ask for no resource: keep NVIDIA's device plugin off these nodes, or off these cards, or others get them, too.
  Where nvidia is not the default runtime, gpu.runtimeClassName names it. Every client runs as 10001, the daemon's own user.
  Clients fail with their daemon, so an upgrade leaves it running: to replace it, delete its pod, then the Tritons of its node.
{{- else if include "penstock.gpu.hasPluginShares" . -}}
{{- if $sharing.devicePlugin.createConfig -}}
{{- $namespace := $sharing.devicePlugin.namespace | default .Release.Namespace -}}
GPU shares: NVIDIA's device plugin has to read the ConfigMap {{ $sharing.devicePlugin.configName }}, which is in namespace {{ $namespace }}, and nodes to be labelled.
  {{- if not $sharing.devicePlugin.namespace }}
  The plugin reads its own namespace alone: if it runs in another, set gpu.sharing.devicePlugin.namespace to that and upgrade.
  {{- end }}
  Where NVIDIA's chart brought the plugin (`helm list -A` names its release, here nvdp), else where the GPU operator did:
    helm upgrade nvdp nvdp/nvidia-device-plugin --namespace {{ $namespace }} --reuse-values --set config.name={{ $sharing.devicePlugin.configName }}
    kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge -p '{"spec": {"devicePlugin": {"config": {"name": "{{ $sharing.devicePlugin.configName }}"}}}}'
    kubectl label node NODE nvidia.com/device-plugin.config={{ $sharing.devicePlugin.configName }}
  A plugin that has a ConfigMap already takes the key {{ $sharing.devicePlugin.configName }} of this one into it.
  {{- if eq $sharing.mode "mps" }}
  The plugin's MPS daemon runs on nodes with nvidia.com/mps.capable=true only, which GPU feature discovery sets; without it:
    kubectl label node NODE nvidia.com/mps.capable=true
  Each Triton gets 1/{{ $sharing.replicas }} of its card's memory and threads. The plugin brings a /dev/shm of its own, so gateway and Triton share no memory.
  {{- else }}
  Nothing is limited or isolated: each Triton may fill the card's memory, and a fault of one ends the others.
  {{- end }}
{{- end -}}
{{- end -}}
{{- end -}}
