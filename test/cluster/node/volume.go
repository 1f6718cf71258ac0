package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// token is a ServiceAccount token and when to get another.
type token struct {
	value string
	renew time.Time
}

// volumeDirs are the folders of the volumes, by name.
func (p *pod) volumeDirs() map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.volumes)
}

// waitVolumes makes the volumes, waiting for what they are made of. It reports false if the pod has
// to stop before.
func (p *pod) waitVolumes(ctx context.Context) bool {
	said := ""
	for {
		if p.isStopping() {
			return false
		}
		err := p.makeVolumes(ctx)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		if err.Error() != said {
			said = err.Error()
			p.warn("FailedMount", "MountVolume.SetUp failed: "+said)
		}
		select {
		case <-p.sources:
		case <-time.After(time.Second): // tokens do not announce themselves
		case <-p.stopping:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// refreshVolumes keeps the volumes up to date until ctx ends.
func (p *pod) refreshVolumes(ctx context.Context) {
	for {
		var renew <-chan time.Time
		p.mu.Lock()
		for _, t := range p.tokens {
			renew = time.After(max(time.Until(t.renew), time.Second)) // all are renewed together
		}
		p.mu.Unlock()
		select {
		case <-p.sources:
		case <-renew:
		case <-ctx.Done():
			return
		}
		if err := p.makeVolumes(ctx); err != nil && ctx.Err() == nil {
			p.node.logger.Warn("volumes not refreshed", "pod", p.name, "err", err) // they stay as they were
		}
	}
}

// makeVolumes makes each volume what it should be now.
func (p *pod) makeVolumes(ctx context.Context) error {
	for i := range p.spec.Volumes {
		volume := &p.spec.Volumes[i]
		dir := filepath.Join(p.dir, volume.Name)
		if volume.HostPath != nil {
			dir = volume.HostPath.Path
		} else if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("volume %q: %w", volume.Name, err)
		}
		p.mu.Lock()
		p.volumes[volume.Name] = dir
		p.mu.Unlock()
		if volume.HostPath != nil || volume.EmptyDir != nil {
			continue
		}
		files, err := p.files(ctx, volume)
		if err == nil {
			err = replaceFiles(dir, files)
		}
		if err != nil {
			return fmt.Errorf("volume %q: %w", volume.Name, err)
		}
	}
	return os.MkdirAll(p.dir, 0o755)
}

// file is one file of a volume.
type file struct {
	content string
	mode    os.FileMode
}

// files are the files of a volume by path.
func (p *pod) files(ctx context.Context, volume *v1.Volume) (map[string]file, error) {
	switch {
	case volume.ConfigMap != nil:
		s := volume.ConfigMap
		return p.configMapFiles(s.Name, s.Items, s.Optional, s.DefaultMode)
	case volume.Secret != nil:
		s := volume.Secret
		return p.secretFiles(s.SecretName, s.Items, s.Optional, s.DefaultMode)
	case volume.DownwardAPI != nil:
		return p.downwardFiles(volume.DownwardAPI.Items, volume.DownwardAPI.DefaultMode)
	case volume.Projected != nil:
		files := map[string]file{}
		for _, source := range volume.Projected.Sources {
			more, err := p.projectedFiles(ctx, volume, source)
			if err != nil {
				return nil, err
			}
			maps.Copy(files, more)
		}
		return files, nil
	}
	return nil, errors.New("this node does not have volumes of its type")
}

func (p *pod) projectedFiles(ctx context.Context, volume *v1.Volume, source v1.VolumeProjection) (map[string]file,
	error) {
	mode := volume.Projected.DefaultMode
	switch {
	case source.ConfigMap != nil:
		return p.configMapFiles(source.ConfigMap.Name, source.ConfigMap.Items, source.ConfigMap.Optional, mode)
	case source.Secret != nil:
		return p.secretFiles(source.Secret.Name, source.Secret.Items, source.Secret.Optional, mode)
	case source.DownwardAPI != nil:
		return p.downwardFiles(source.DownwardAPI.Items, mode)
	case source.ServiceAccountToken != nil:
		value, err := p.token(ctx, volume.Name+"/"+source.ServiceAccountToken.Path, source.ServiceAccountToken)
		if err != nil {
			return nil, err
		}
		return map[string]file{source.ServiceAccountToken.Path: {value, fileMode(mode, nil)}}, nil
	}
	return nil, errors.New("this node does not have projections of its type")
}

func (p *pod) configMapFiles(name string, items []v1.KeyToPath, optional *bool, mode *int32) (map[string]file, error) {
	object, err := p.node.configMaps.ConfigMaps(p.name.Namespace).Get(name)
	if err != nil {
		return nil, unlessOptional(err, optional)
	}
	data := maps.Clone(object.Data)
	if data == nil {
		data = map[string]string{}
	}
	for key, value := range object.BinaryData {
		data[key] = string(value)
	}
	return keyFiles("ConfigMap "+name, data, items, optional, mode)
}

func (p *pod) secretFiles(name string, items []v1.KeyToPath, optional *bool, mode *int32) (map[string]file, error) {
	object, err := p.node.secrets.Secrets(p.name.Namespace).Get(name)
	if err != nil {
		return nil, unlessOptional(err, optional)
	}
	data := map[string]string{}
	for key, value := range object.Data {
		data[key] = string(value)
	}
	return keyFiles("Secret "+name, data, items, optional, mode)
}

// keyFiles are the files that keys become: each its own, or those of items.
func keyFiles(what string, data map[string]string, items []v1.KeyToPath, optional *bool, mode *int32) (map[string]file,
	error) {
	files := map[string]file{}
	if items == nil {
		for key, value := range data {
			files[key] = file{value, fileMode(mode, nil)}
		}
	}
	for _, item := range items {
		value, ok := data[item.Key]
		if !ok {
			if optional != nil && *optional {
				continue
			}
			return nil, fmt.Errorf("%s has no key %q", what, item.Key)
		}
		files[item.Path] = file{value, fileMode(mode, item.Mode)}
	}
	return files, nil
}

func (p *pod) downwardFiles(items []v1.DownwardAPIVolumeFile, mode *int32) (map[string]file, error) {
	files := map[string]file{}
	for _, item := range items {
		var value string
		var err error
		switch {
		case item.FieldRef != nil:
			value, err = p.field(item.FieldRef.FieldPath)
		case item.ResourceFieldRef != nil && len(p.mains) > 0:
			value, err = p.mains[0].resource(item.ResourceFieldRef)
		}
		if err != nil {
			return nil, err
		}
		files[item.Path] = file{value, fileMode(mode, item.Mode)}
	}
	return files, nil
}

func fileMode(standard, own *int32) os.FileMode {
	if own != nil {
		return os.FileMode(*own) & 0o777
	}
	if standard != nil {
		return os.FileMode(*standard) & 0o777
	}
	return 0o644
}

// token returns a token of the pod's ServiceAccount, bound to the pod: the one it has, until that
// is due for renewal.
func (p *pod) token(ctx context.Context, key string, source *v1.ServiceAccountTokenProjection) (string, error) {
	p.mu.Lock()
	have, ok := p.tokens[key]
	p.mu.Unlock()
	if ok && time.Now().Before(have.renew) {
		return have.value, nil
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: source.ExpirationSeconds,
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: p.name.Name,
			UID: p.uid},
	}}
	if source.Audience != "" {
		request.Spec.Audiences = []string{source.Audience}
	}
	account := p.spec.ServiceAccountName
	if account == "" {
		account = "default"
	}
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	answer, err := p.node.client.CoreV1().ServiceAccounts(p.name.Namespace).CreateToken(call, account, request,
		metav1.CreateOptions{})
	if err != nil {
		if ok && !apierrors.IsNotFound(err) {
			return have.value, nil // good for a fifth of its life yet
		}
		return "", fmt.Errorf("token for ServiceAccount %q: %w", account, err)
	}
	fresh := token{value: answer.Status.Token,
		renew: time.Now().Add(time.Until(answer.Status.ExpirationTimestamp.Time) * 4 / 5)}
	p.mu.Lock()
	p.tokens[key] = fresh
	p.mu.Unlock()
	return fresh.value, nil
}

// kubeconfig writes a kubeconfig for the ServiceAccount whose token is mounted in the container
// where pods expect it, and returns its path, or nothing if none is.
func (c *container) kubeconfig() string {
	p := c.pod
	for _, mount := range c.spec.VolumeMounts {
		if mount.MountPath != "/var/run/secrets/kubernetes.io/serviceaccount" {
			continue
		}
		dir := p.volumeDirs()[mount.Name]
		config := clientcmdapi.NewConfig()
		config.Clusters["test"] = &clientcmdapi.Cluster{Server: p.node.server,
			CertificateAuthority: filepath.Join(dir, v1.ServiceAccountRootCAKey)}
		config.AuthInfos["pod"] = &clientcmdapi.AuthInfo{TokenFile: filepath.Join(dir, v1.ServiceAccountTokenKey)}
		config.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "pod", Namespace: p.name.Namespace}
		config.CurrentContext = "test"
		path := filepath.Join(p.dir, "_kubeconfig")
		if err := clientcmd.WriteToFile(*config, path); err != nil {
			p.node.logger.Warn("kubeconfig not written", "pod", p.name, "err", err)
			return ""
		}
		return path
	}
	return ""
}

// replaceFiles makes the files of a folder those given, all at one moment for who reads through the
// link ..data, as in a real volume. Programs that watch for changes rely on that.
func replaceFiles(dir string, files map[string]file) error {
	data := filepath.Join(dir, "..data")
	if sameFiles(data, files) {
		return nil
	}
	fresh, err := os.MkdirTemp(dir, "..")
	if err != nil {
		return err
	}
	if err := os.Chmod(fresh, 0o755); err != nil {
		return err
	}
	tops := map[string]bool{}
	for path, f := range files {
		full := filepath.Join(fresh, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(full, []byte(f.content), f.mode|0o400); err != nil {
			return err
		}
		top, _, _ := strings.Cut(filepath.Clean(path), "/")
		tops[top] = true
	}
	old, _ := os.Readlink(data)
	link := data + "_tmp"
	os.Remove(link)
	if err := os.Symlink(filepath.Base(fresh), link); err != nil {
		return err
	}
	if err := os.Rename(link, data); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if name := entry.Name(); !strings.HasPrefix(name, "..") && !tops[name] {
			os.Remove(filepath.Join(dir, name))
		}
	}
	for _, top := range slices.Sorted(maps.Keys(tops)) {
		err := os.Symlink(filepath.Join("..data", top), filepath.Join(dir, top))
		if err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	if old != "" {
		os.RemoveAll(filepath.Join(dir, old))
	}
	return nil
}

// sameFiles reports whether the files below root are those given.
func sameFiles(root string, files map[string]file) bool {
	have := 0
	same := true
	target, err := filepath.EvalSymlinks(root)
	if err != nil {
		return false
	}
	err = filepath.WalkDir(target, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		have++
		name, err := filepath.Rel(target, path)
		if err != nil {
			return err
		}
		content, err := os.ReadFile(path)
		want, ok := files[name]
		same = same && err == nil && ok && string(content) == want.content
		return nil
	})
	return err == nil && same && have == len(files)
}
