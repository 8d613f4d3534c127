{{- define "gpufs.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "gpufs.labels" -}}
app.kubernetes.io/name: gpufs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpufs.podMetadata" -}}
{{- with .Values.podAnnotations }}
annotations: {{ toJson . }}
{{- end }}
labels:
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "gpufs.labels" . | nindent 2 }}
{{- end }}

{{- define "gpufs.scheduling" -}}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}
