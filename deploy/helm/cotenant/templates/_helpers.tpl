{{/* Prefix of the names of all objects: the release's name, and the chart's name unless the release's contains it. Names
of Services have no dot, begin with a letter, and have at most 63 characters. If the prefix does not fit, a hash keeps it
unique. */}}
{{- define "cotenant.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) -}}{{- $name = printf "%s-%s" $name .Chart.Name -}}{{- end -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]{0,39}$" $name) -}}
{{- $name = printf "c-%s-%s" (replace "." "-" $name | trunc 28) (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}
