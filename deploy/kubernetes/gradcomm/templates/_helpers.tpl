{{- define "gradcomm.name" -}}
{{- $name := .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- if contains "gradcomm" $name }}{{ $name }}{{ else }}{{ printf "%s-gradcomm" $name }}{{ end -}}
{{- end -}}

{{- define "gradcomm.selector" -}}
app.kubernetes.io/name: gradcomm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gradcomm.labels" -}}
{{ include "gradcomm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "gradcomm.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{/* Lane i has port + i, the control link the port after the last lane. */}}
{{- define "gradcomm.lastPort" -}}
{{ add .Values.port .Values.lanes }}
{{- end -}}

{{/* What the daemon would refuse anyway, said before anything is installed. */}}
{{- define "gradcomm.check" -}}
{{- $v := .Values -}}
{{- if ne (empty $v.keys.secret) (empty $v.keys.peersConfigMap) -}}
{{- fail "keys.secret and keys.peersConfigMap belong together: give both or neither" -}}
{{- end -}}
{{- if and (not $v.keys.secret) (not $v.insecure) -}}
{{- fail "daemons need keys: set keys.secret and keys.peersConfigMap, or insecure=true on a network that is trusted" -}}
{{- end -}}
{{- if and $v.metrics.enabled (not $v.admin.tlsSecret) (not $v.insecure) -}}
{{- fail "metrics.enabled needs admin.tlsSecret, or insecure=true on a network that is trusted" -}}
{{- end -}}
{{- if and $v.podMonitor.enabled (not $v.metrics.enabled) -}}
{{- fail "podMonitor.enabled needs metrics.enabled" -}}
{{- end -}}
{{- if and $v.podMonitor.enabled $v.networkPolicy.enabled (not $v.hostNetwork) (not $v.networkPolicy.metricsFrom) -}}
{{- fail "podMonitor.enabled needs networkPolicy.metricsFrom: as it is, the policy lets nobody read /metrics" -}}
{{- end -}}
{{- if and $v.podMonitor.enabled $v.admin.tlsSecret (not $v.podMonitor.tlsSecret) -}}
{{- fail "podMonitor.tlsSecret is needed: with admin.tlsSecret /metrics wants a certificate of whoever reads it" -}}
{{- end -}}
{{- end -}}

{{/* The pod's own resources: the same for every container, or the pod is not Guaranteed and gets no cores of its own. */}}
{{- define "gradcomm.resources" -}}
requests:
  cpu: {{ .Values.resources.cpu }}
  memory: {{ .Values.resources.memory }}
limits:
  cpu: {{ .Values.resources.cpu }}
  memory: {{ .Values.resources.memory }}
{{- end -}}
