{{- define "tidegate.name" -}}
{{- if contains "tidegate" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-tidegate" (.Release.Name | trunc 31 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The settings file: what values say, and over it what the chart itself must know. */ -}}
{{- define "tidegate.config" -}}
{{- if not (regexMatch "^(s3|az)://" .Values.config.blobs.url) -}}
{{- fail "config.blobs.url must be s3://BUCKET/PREFIX or az://CONTAINER/PREFIX: pods share no disk" -}}
{{- end -}}
{{- if hasPrefix "sqlite:" (dig "url" "" .Values.config.store) -}}
{{- fail "config.store.url must be of PostgreSQL, such as env:DATABASE_URL: pods share no disk" -}}
{{- end -}}
{{- if ne (len (uniq (list .Values.ports.api .Values.ports.metrics .Values.ports.admin))) 3 -}}
{{- fail "ports.api, ports.metrics and ports.admin must differ" -}}
{{- end -}}
{{- $ours := dict
  "data" "/var/lib/tidegate"
  "server" (dict "host" "0.0.0.0" "port" (int .Values.ports.api))
  "metrics" (dict "host" "0.0.0.0" "port" (int .Values.ports.metrics)) -}}
{{- if .Values.admin.enabled -}}
{{- $_ := set $ours "admin" (dict "host" "0.0.0.0" "port" (int .Values.ports.admin)) -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $ours) -}}
{{- end }}

{{- define "tidegate.graceSeconds" -}}
{{- add 10 (div (add (int64 .Values.config.worker.grace_ms) 999) 1000) -}}
{{- end }}

{{- /* The pod of one role. Takes root, role and the role's values. */ -}}
{{- define "tidegate.pod" -}}
{{- $root := .root -}}
metadata:
  labels:
    {{- include "tidegate.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
  annotations:
    checksum/config: {{ include "tidegate.config" $root | sha256sum }}
spec:
  serviceAccountName: {{ include "tidegate.name" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (include "tidegate.graceSeconds" $root | int64) (.values.drainSeconds | default 0 | int64) }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with get $.values $key }}
  {{ $key }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - name: {{ .role }}
      {{- with $root.Values.image }}
      image: "{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $root.Chart.AppVersion }}{{ end }}"
      {{- end }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [{{ .role }}, --config, /etc/tidegate/tidegate.yaml]
      {{- with $root.Values.secrets.env }}
      envFrom:
        {{- range . }}
        - secretRef: {name: {{ . | quote }}}
        {{- end }}
      {{- end }}
      ports:
        {{- if eq .role "api" }}
        - {name: api, containerPort: {{ $root.Values.ports.api }}}
        {{- if $root.Values.admin.enabled }}
        - {name: admin, containerPort: {{ $root.Values.ports.admin }}}
        {{- end }}
        {{- end }}
        - {name: metrics, containerPort: {{ $root.Values.ports.metrics }}}
      # On the port of its own: clients that fill the API's connections must not look like a process that hangs.
      startupProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 2
        failureThreshold: 300
      livenessProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 2
      {{- with .values.drainSeconds }}
      lifecycle:
        preStop: {exec: {command: [sleep, {{ . | quote }}]}}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources: {{- toYaml .values.resources | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/tidegate, readOnly: true}
        - {name: data, mountPath: /var/lib/tidegate}
        - {name: tmp, mountPath: /tmp}
        {{- range $index, $file := $root.Values.secrets.files }}
        - {name: secret-{{ $index }}, mountPath: {{ $file.mountPath | quote }}, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "tidegate.name" $root }}}
    - name: tmp
      emptyDir: {}
    {{- if not (dig "persistence" "enabled" false .values) }}
    - name: data
      emptyDir: {}
    {{- end }}
    {{- range $index, $file := $root.Values.secrets.files }}
    - name: secret-{{ $index }}
      secret: {secretName: {{ $file.name | quote }}}
    {{- end }}
{{- end }}
