package source

import (
	"cmp"
	"context"
	"log/slog"
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

// Checks tells the set how to probe: each pool as the annotation of its Service says, that of its
// port before the one of all ports, or where there is none as the file says.
type Checks struct {
	set  *health.Set
	log  *slog.Logger
	wake func()
	// ofFile are the checks of the file, by pool; pools those that a Service feeds.
	ofFile map[health.Pool]health.Check
	pools  map[types.NamespacedName][]health.Pool
	ports  map[health.Pool]endpoints.Port
	known  chan struct{}
	// Refuse is told of Services whose pods cannot stand for each other, see [gateway.Refuser].
	// Nothing is probed then. Nil: the gateway's pools are the agent's own.
	Refuse  func(pool health.Pool, why string)
	watches map[string]*watch.Watch

	mu sync.Mutex
	// refused are the annotations that could not be read, so that it is said once.
	refused map[annotation]string
}

// annotation is one of a Service.
type annotation struct {
	service types.NamespacedName
	key     string
}

// NewChecks returns the checks of the pools of routes, and tells set what the routes say. wake is
// called when set was told more. Without annotations Services are not read, and the file counts.
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

// Known is closed once the annotations of all Services were heard.
func (c *Checks) Known() <-chan struct{} { return c.known }

// Run follows the annotations of the Services until ctx is done. Where the agent may not read
// Services, the file counts.
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

// heard takes in what a Service says. A check that cannot be read changes nothing: what was said
// before, or the file, still counts.
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
	for _, pool := range pools {
		key := health.CheckAnnotationOf(c.ports[pool].Name)
		text, given := s.Annotations[key]
		if !given {
			delete(c.refused, annotation{name, key})
			key = health.CheckAnnotation
			text, given = s.Annotations[key]
		}
		from := annotation{name, key}
		if !given || gone {
			delete(c.refused, from)
			c.set.SetCheck(time.Now(), pool, c.ofFile[pool])
			continue
		}
		check, err := health.ParseCheck(text)
		if err != nil {
			if c.refused[from] != text {
				c.refused[from] = text
				c.log.Warn("a Service's health check is refused; what was said before counts", "service", name.String(),
					"annotation", key, "error", err)
			}
			continue
		}
		delete(c.refused, from)
		c.set.SetCheck(time.Now(), pool, check)
	}
	c.wake()
}

// singular returns why clients of a Service mean a single pod of it. Empty: they do not.
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
