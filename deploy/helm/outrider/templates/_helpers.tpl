{{/* One name for everything of a release. */}}
{{- define "outrider.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "outrider.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "outrider.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "outrider.probe" -}}
httpGet: {path: /health, port: verifier, scheme: {{ .Values.tls.enabled | ternary "HTTPS" "HTTP" }}}
{{- end -}}

{{/* A JSON scalar is a TOML one. */}}
{{- define "outrider.toml" -}}
[cloud]
listen = "0.0.0.0:8765"
token-file = "tokens"
{{- if .Values.tls.enabled }}
tls-cert = "tls.crt"
tls-key = "tls.key"
{{- else }}
insecure = true
{{- end }}
{{- range $key, $value := .Values.cloud }}
{{ $key }} = {{ eq $key "drain" | ternary (printf "%.1f" (float64 $value)) (toJson $value) }}
{{- end }}
{{ end -}}
