{{/* What the names of all objects begin with: the release, and the chart's name unless the release has it. Names of
Services have no dot, begin with a letter and end after 63 characters: other releases have a hash that keeps them apart. */}}
{{- define "cotenant.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) -}}{{- $name = printf "%s-%s" $name .Chart.Name -}}{{- end -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]{0,39}$" $name) -}}
{{- $name = printf "c-%s-%s" (replace "." "-" $name | trunc 28) (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}
