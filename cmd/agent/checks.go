package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/pkg/endpoints"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// servicesMost is how long the gateway waits for the Services' annotations when the agent starts: without them nobody is known to be probed, so
// that those whom an earlier agent had taken out for their health would come back.
const servicesMost = time.Second

// checks tells the set how to probe: each pool as the annotation of its Service says, that of its port before the one of all ports, or
// where there is none as the file says.
type checks struct {
	set  *health.Set
	log  *slog.Logger
	wake func()
	// ofFile are the checks of the file, by pool; pools those that a Service feeds.
	ofFile map[health.Pool]health.Check
	pools  map[types.NamespacedName][]health.Pool
	ports  map[health.Pool]endpoints.Port
	// known is closed once the annotations of all Services were heard.
	known chan struct{}

	mu sync.Mutex
	// refused are the annotations that could not be read, so that it is said once.
	refused map[annotation]string
}

// annotation is one of a Service.
type annotation struct {
	service types.NamespacedName
	key     string
}

// newChecks sets what the file says.
func newChecks(f file, ports map[health.Pool]endpoints.Port, set *health.Set, wake func(), log *slog.Logger) *checks {
	c := &checks{
		set: set, log: log, wake: wake, ofFile: map[health.Pool]health.Check{}, pools: map[types.NamespacedName][]health.Pool{},
		ports: ports, known: make(chan struct{}), refused: map[annotation]string{},
	}
	for _, b := range f.HAProxy.Backends {
		pool := health.Pool(b.Backend)
		c.ofFile[pool], _ = health.ParseCheck(string(b.HealthCheck)) // checked by file.check
		service := ports[pool].Service
		c.pools[service] = append(c.pools[service], pool)
		set.SetCheck(time.Now(), pool, c.ofFile[pool])
	}
	return c
}

// run follows the annotations of the Services until ctx is done. Where the agent may not read Services, the file counts: nothing waits
// for them, but for the first programming of the gateway, by servicesMost.
func (c *checks) run(ctx context.Context, kube kubernetes.Interface) error {
	ctx, cancel := context.WithCancel(ctx)
	var factories []informers.SharedInformerFactory
	defer func() {
		cancel()
		for _, factory := range factories {
			factory.Shutdown()
		}
	}()
	watched := map[string]bool{}
	var has []toolscache.InformerSynced
	for service := range c.pools {
		if watched[service.Namespace] {
			continue
		}
		watched[service.Namespace] = true
		factory := informers.NewSharedInformerFactoryWithOptions(kube, 0, informers.WithNamespace(service.Namespace))
		informer := factory.Core().V1().Services().Informer()
		if err := informer.SetTransform(reduceService); err != nil {
			return fmt.Errorf("watch Services of namespace %s: %w", service.Namespace, err)
		}
		registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { c.heard(o, false) },
			UpdateFunc: func(_, o any) { c.heard(o, false) },
			DeleteFunc: func(o any) {
				if missed, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
					o = missed.Obj
				}
				c.heard(o, true)
			},
		})
		if err != nil {
			return fmt.Errorf("watch Services of namespace %s: %w", service.Namespace, err)
		}
		has = append(has, registration.HasSynced)
		factory.Start(ctx.Done())
		factories = append(factories, factory)
	}
	if toolscache.WaitForCacheSync(ctx.Done(), has...) {
		close(c.known)
	}
	<-ctx.Done()
	return nil
}

// reduceService keeps what is read here.
func reduceService(o any) (any, error) {
	s, ok := o.(*corev1.Service)
	if !ok {
		return o, nil
	}
	s.ManagedFields, s.Spec, s.Status = nil, corev1.ServiceSpec{}, corev1.ServiceStatus{}
	return s, nil
}

// heard takes in what a Service says. A check that cannot be read changes nothing: what was said before, or the file, still counts.
func (c *checks) heard(o any, gone bool) {
	s, ok := o.(*corev1.Service)
	if !ok {
		return
	}
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	pools := c.pools[name]
	if len(pools) == 0 {
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
				c.log.Warn("a Service's health check is refused; what was said before counts", "service", name.String(), "annotation", key, "error", err)
			}
			continue
		}
		delete(c.refused, from)
		c.set.SetCheck(time.Now(), pool, check)
	}
	c.wake()
}

// refusals returns how many annotations cannot be read.
func (c *checks) refusals() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.refused)
}
