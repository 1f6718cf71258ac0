package source

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Checks configures how the set probes each pool: by the annotation of its Service's port, else by
// that of the Service, else by the file.
type Checks struct {
	set  *health.Set
	log  *slog.Logger
	wake func()
	// ofFile are the checks in the file, by pool; pools are the pools that each Service feeds.
	ofFile map[health.Pool]health.Check
	pools  map[types.NamespacedName][]health.Pool
	ports  map[health.Pool]endpoints.Port
	known  chan struct{}
	// Refuse is called for each Service with why its pods are not interchangeable, or with nothing,
	// see [gateway.Refuser]. Nothing is probed then. Nil: the gateway's pools are the agent's own.
	Refuse  func(pool health.Pool, why string)
	watches map[string]*watch.Watch

	mu sync.Mutex
	// refused are the annotations that could not be read, so that each is logged once.
	refused map[annotation]string
}

// annotation is one annotation of a Service.
type annotation struct {
	service types.NamespacedName
	key     string
}

// NewChecks returns the checks of the pools of routes, and applies those of the routes to set. wake
// is called when a check has changed. Without annotations only the routes count, and Services are
// not read.
func NewChecks(kube kubernetes.Interface, routes []gateway.Route, annotations bool, set *health.Set, wake func(),
	log *slog.Logger) (*Checks, error) {
	c := &Checks{
		set: set, log: log, wake: wake, ofFile: map[health.Pool]health.Check{},
		pools: map[types.NamespacedName][]health.Pool{},
		ports: Ports(routes), known: make(chan struct{}), watches: map[string]*watch.Watch{},
		refused: map[annotation]string{},
	}
	for _, r := range routes {
		c.ofFile[r.Pool], _ = health.ParseCheck(r.HealthCheck) // checked with the configuration
		service := c.ports[r.Pool].Service
		c.pools[service] = append(c.pools[service], r.Pool)
		set.SetCheck(time.Now(), r.Pool, c.ofFile[r.Pool])
		if !annotations || c.watches[service.Namespace] != nil {
			continue
		}
		w, err := watch.New(kube, watch.Options[*corev1.Service]{
			Informer: func(f informers.SharedInformerFactory) toolscache.SharedIndexInformer {
				return f.Core().V1().Services().Informer()
			},
			Namespace: service.Namespace,
			Reduce: func(s *corev1.Service) *corev1.Service {
				s.ManagedFields, s.Status = nil, corev1.ServiceStatus{}
				s.Spec = corev1.ServiceSpec{ClusterIP: s.Spec.ClusterIP, SessionAffinity: s.Spec.SessionAffinity}
				return s
			},
			Changed: func(was, is *corev1.Service) { c.heard(cmp.Or(is, was), is == nil) },
		})
		if err != nil {
			return nil, err
		}
		c.watches[service.Namespace] = w
	}
	return c, nil
}

// Known is closed once the annotations of all Services are known.
func (c *Checks) Known() <-chan struct{} { return c.known }

// Run watches the annotations of the Services until ctx is done. If the agent may not read
// Services, only the file counts.
func (c *Checks) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, w := range c.watches {
		wg.Go(func() { _ = w.Run(ctx) }) // it has no error
	}
	for _, w := range c.watches {
		if !w.Synced(ctx) {
			return nil
		}
	}
	close(c.known)
	<-ctx.Done()
	return nil
}

// heard applies the annotations of a Service. If a check cannot be read, the check before, or that
// of the file, stays.
func (c *Checks) heard(s *corev1.Service, gone bool) {
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	pools := c.pools[name]
	if len(pools) == 0 {
		return
	}
	if c.Refuse != nil {
		for _, pool := range pools {
			c.Refuse(pool, singular(&s.Spec))
		}
		c.wake()
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.refused, func(of annotation, text string) bool {
		now, given := s.Annotations[of.key]
		return of.service == name && (gone || !given || now != text)
	})
	for _, pool := range pools {
		key := health.CheckAnnotationOf(c.ports[pool].Name)
		text, given := s.Annotations[key]
		if !given {
			key = health.CheckAnnotation
			text, given = s.Annotations[key]
		}
		from := annotation{name, key}
		if !given || gone {
			c.set.SetCheck(time.Now(), pool, c.ofFile[pool])
			continue
		}
		check, err := health.ParseCheck(text)
		if err != nil {
			if c.refused[from] != text {
				c.refused[from] = text
				c.log.Warn("health check of a Service cannot be read: the former one stays", "service", name.String(),
					"annotation", key, "error", err)
			}
			continue
		}
		c.set.SetCheck(time.Now(), pool, check)
	}
	c.wake()
}

// singular returns why the pods of a Service are not interchangeable. Empty: they are.
func singular(s *corev1.ServiceSpec) string {
	switch {
	case s.ClusterIP == corev1.ClusterIPNone:
		return "the Service is headless: connections mean a single pod"
	case s.SessionAffinity == corev1.ServiceAffinityClientIP:
		return "the Service has the session affinity ClientIP: clients are bound to a pod"
	}
	return ""
}

// Refusals returns how many annotations cannot be read.
func (c *Checks) Refusals() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.refused)
}
