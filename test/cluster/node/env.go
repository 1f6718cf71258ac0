package node

import (
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
)

// environment is the variables of a container, later ones replacing earlier ones.
type environment struct {
	values map[string]string
}

func (e *environment) list() []string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(e.values)) {
		list = append(list, name+"="+e.values[name])
	}
	return list
}

// volumeVariable is the variable that has the folder of a volume.
func volumeVariable(volume string) string {
	return "VOLUME_" + strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' {
			return r - 'a' + 'A'
		}
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, volume)
}

// environment is what the processes of the container see: what the node gives, then envFrom, then
// env.
func (c *container) environment() (*environment, error) {
	p, n := c.pod, c.pod.node
	host, port := n.serverHostPort()
	values := map[string]string{
		"PATH": os.Getenv("PATH"), "HOME": p.dir, "HOSTNAME": p.name.Name,
		"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port,
	}
	for _, pair := range n.options.Env {
		name, value, _ := strings.Cut(pair, "=")
		values[name] = value
	}
	for name, dir := range p.volumeDirs() {
		values[volumeVariable(name)] = dir
	}
	if path := c.kubeconfig(); path != "" {
		values["KUBECONFIG"] = path
	}
	for _, from := range c.spec.EnvFrom {
		more, err := c.envFrom(from)
		if err != nil {
			return nil, err
		}
		for name, value := range more {
			values[from.Prefix+name] = value
		}
	}
	for _, variable := range c.spec.Env {
		if variable.ValueFrom == nil {
			values[variable.Name] = expand(variable.Value, values)
			continue
		}
		value, ok, err := c.envValue(variable.ValueFrom)
		if err != nil {
			return nil, fmt.Errorf("variable %s: %w", variable.Name, err)
		}
		if ok {
			values[variable.Name] = value
		}
	}
	return &environment{values: values}, nil
}

func (c *container) envFrom(from v1.EnvFromSource) (map[string]string, error) {
	n, namespace := c.pod.node, c.pod.name.Namespace
	switch {
	case from.ConfigMapRef != nil:
		object, err := n.configMaps.ConfigMaps(namespace).Get(from.ConfigMapRef.Name)
		if err != nil {
			return nil, unlessOptional(err, from.ConfigMapRef.Optional)
		}
		return object.Data, nil
	case from.SecretRef != nil:
		object, err := n.secrets.Secrets(namespace).Get(from.SecretRef.Name)
		if err != nil {
			return nil, unlessOptional(err, from.SecretRef.Optional)
		}
		values := map[string]string{}
		for name, value := range object.Data {
			values[name] = string(value)
		}
		return values, nil
	}
	return nil, nil
}

// envValue is the value of a variable with a source. It is not set if an optional source is not
// there.
func (c *container) envValue(from *v1.EnvVarSource) (value string, ok bool, err error) {
	n, namespace := c.pod.node, c.pod.name.Namespace
	switch {
	case from.FieldRef != nil:
		value, err := c.pod.field(from.FieldRef.FieldPath)
		return value, err == nil, err
	case from.ResourceFieldRef != nil:
		value, err := c.resource(from.ResourceFieldRef)
		return value, err == nil, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		object, err := n.configMaps.ConfigMaps(namespace).Get(ref.Name)
		if err != nil {
			return "", false, unlessOptional(err, ref.Optional)
		}
		value, ok := object.Data[ref.Key]
		if !ok {
			return "", false, unlessOptional(fmt.Errorf("ConfigMap %q has no key %q", ref.Name, ref.Key), ref.Optional)
		}
		return value, true, nil
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		object, err := n.secrets.Secrets(namespace).Get(ref.Name)
		if err != nil {
			return "", false, unlessOptional(err, ref.Optional)
		}
		value, ok := object.Data[ref.Key]
		if !ok {
			return "", false, unlessOptional(fmt.Errorf("Secret %q has no key %q", ref.Name, ref.Key), ref.Optional)
		}
		return string(value), true, nil
	}
	return "", false, fmt.Errorf("this node does not know its source")
}

// unlessOptional is nil for something that is not there and need not be.
func unlessOptional(err error, optional *bool) error {
	if optional != nil && *optional {
		if _, status := err.(errors.APIStatus); !status || errors.IsNotFound(err) {
			return nil
		}
	}
	return err
}

// field is the value of a field of the pod, for fieldRef.
func (p *pod) field(path string) (string, error) {
	object := p.latestPod()
	for prefix, values := range map[string]map[string]string{
		"metadata.labels": object.Labels, "metadata.annotations": object.Annotations,
	} {
		if path == prefix {
			var lines []string
			for _, key := range slices.Sorted(maps.Keys(values)) {
				lines = append(lines, fmt.Sprintf("%s=%q", key, values[key]))
			}
			return strings.Join(lines, "\n"), nil
		}
		if key, ok := strings.CutPrefix(path, prefix+"['"); ok {
			return values[strings.TrimSuffix(key, "']")], nil
		}
	}
	switch path {
	case "metadata.name":
		return object.Name, nil
	case "metadata.namespace":
		return object.Namespace, nil
	case "metadata.uid":
		return string(object.UID), nil
	case "spec.nodeName":
		return object.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return object.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs":
		return p.ip(), nil
	case "status.hostIP", "status.hostIPs":
		return p.node.address.String(), nil
	}
	return "", fmt.Errorf("this node does not know the field %q", path)
}

// resource is a limit or request of a container, for resourceFieldRef. Without a limit it is what
// the node has.
func (c *container) resource(ref *v1.ResourceFieldSelector) (string, error) {
	spec := c.spec
	for _, other := range append(append([]*container(nil), c.pod.inits...), c.pod.mains...) {
		if ref.ContainerName == other.spec.Name {
			spec = other.spec
		}
	}
	kind, name, _ := strings.Cut(ref.Resource, ".")
	var quantity resource.Quantity
	switch kind {
	case "limits":
		var ok bool
		if quantity, ok = spec.Resources.Limits[v1.ResourceName(name)]; !ok {
			quantity = resource.MustParse(map[string]string{"cpu": "1000", "memory": "1Ti"}[name])
		}
	case "requests":
		quantity = spec.Resources.Requests[v1.ResourceName(name)]
	default:
		return "", fmt.Errorf("this node does not know the resource %q", ref.Resource)
	}
	divisor := ref.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	return strconv.FormatInt(int64(math.Ceil(quantity.AsApproximateFloat64()/divisor.AsApproximateFloat64())), 10), nil
}

func expandAll(texts []string, values map[string]string) []string {
	var result []string
	for _, text := range texts {
		result = append(result, expand(text, values))
	}
	return result
}

// expand replaces $(NAME) by the value of NAME. A name without value stays as it is, and $$ is $.
func expand(text string, values map[string]string) string {
	var result strings.Builder
	for {
		i := strings.IndexByte(text, '$')
		if i < 0 || i+1 == len(text) {
			result.WriteString(text)
			return result.String()
		}
		result.WriteString(text[:i])
		text = text[i:]
		end := strings.IndexByte(text, ')')
		switch {
		case text[1] == '$':
			result.WriteByte('$')
			text = text[2:]
		case text[1] == '(' && end > 0:
			if value, ok := values[text[2:end]]; ok {
				result.WriteString(value)
			} else {
				result.WriteString(text[:end+1])
			}
			text = text[end+1:]
		default:
			result.WriteByte('$')
			text = text[1:]
		}
	}
}
