{{/* Name of everything in the release: two releases in one namespace do not meet. */}}
{{- define "stoker.name" -}}
{{ printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Name of what has no namespace: two releases of the same name in two namespaces do not meet. */}}
{{- define "stoker.clusterName" -}}
{{ printf "%s-%s" .Release.Namespace (include "stoker.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: stoker-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: stoker
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "stoker.gatewayName" -}}
{{ printf "%s-gateway" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "stoker.gatewaySelector" -}}
app.kubernetes.io/name: stoker-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stoker.gatewayLabels" -}}
{{ include "stoker.gatewaySelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: stoker
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Pods of this release as a peer of a NetworkPolicy. Takes a list: the root, the name of the template of their labels. */}}
{{- define "stoker.peer" -}}
{{- $root := index . 0 -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" $root.Release.Namespace) -}}
{{ dict "namespaceSelector" $namespace "podSelector" (dict "matchLabels" (include (index . 1) $root | fromYaml)) | toJson }}
{{- end }}

{{/* REPOSITORY:TAG. Takes a list: the image's values, the name of the value, the chart. */}}
{{- define "stoker.image" -}}
{{- $image := index . 0 -}}
{{- $repository := required (printf "%s.repository: name the image you built and pushed (docs/install.md)" (index . 1)) $image.repository -}}
{{ $repository }}:{{ default (index . 2).AppVersion $image.tag }}
{{- end }}

{{/* Who may reach replicas, as the operator takes it. An empty list means everybody, the gateway too. */}}
{{- define "stoker.replicaPeers" -}}
{{- $operator := include "stoker.peer" (list . "stoker.selector") | fromJson -}}
{{- $inference := .Values.agent.networkPolicy.inferenceFrom -}}
{{- $peers := dict "operator" $operator -}}
{{- if .Values.gateway.enabled -}}
{{- $gateway := include "stoker.peer" (list . "stoker.gatewaySelector") | fromJson -}}
{{- $peers = set $peers "gateways" $gateway -}}
{{- if $inference -}}
{{- $inference = append $inference $gateway -}}
{{- end -}}
{{- end -}}
{{ set $peers "inference" $inference | toJson }}
{{- end }}

{{/* What the operator may do where it watches. Each rule says what for. */}}
{{- define "stoker.rules" -}}
# The objects it serves. It writes their status, and spec.replicas when the number changes hands between it and the scale
# subresource. `finalizers` lets it own children where owner references are checked.
- apiGroups: [stoker.dev]
  resources: [inferencedeployments]
  verbs: [get, list, watch, patch]
- apiGroups: [stoker.dev]
  resources: [inferencedeployments/status]
  verbs: [patch]
- apiGroups: [stoker.dev]
  resources: [inferencedeployments/finalizers]
  verbs: [update]
# GPUs that namespaces may have, and what became of that.
- apiGroups: [stoker.dev]
  resources: [inferencebudgets]
  verbs: [list, watch]
- apiGroups: [stoker.dev]
  resources: [inferencebudgets/status]
  verbs: [patch]
# The replicas. It deletes them itself, after their drain.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch, delete]
# One Service per deployment, which goes with it.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
# Where a Service leads to gateways: no selector reaches them in another namespace. And where gateways are.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch, create, patch, delete]
# One ConfigMap per revision, deleted when no pod uses it, and one with the operator's public keys.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
# One PodDisruptionBudget per deployment, which goes with it.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
# One NetworkPolicy per deployment if agent.networkPolicy is enabled, deleted when it is not any more.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# One InferencePool per deployment if gateway.endpointPicker is enabled, where the cluster has the kind, deleted when it is not any more.
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
# Whether a model fits what its pods may land on. Nodes are in no namespace: where it watches one, it does not know them.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# The same of GPUs that drivers publish (Dynamic Resource Allocation), and who has them. These are in no namespace, too, but for claims.
- apiGroups: [resource.k8s.io]
  resources: [resourceslices, deviceclasses, resourceclaims]
  verbs: [list, watch]
# What the claims of pods are made from, where a deployment asks for its GPUs by resources.deviceClass; it goes with the deployment.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [create, patch]
# What it says about them in `kubectl describe`.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
