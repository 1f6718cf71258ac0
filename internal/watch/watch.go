// Package watch follows objects of one type in the API server. It is the only package that sets up
// informers for agents, and keeps no more of an object than its caller asks for.
package watch

import (
	"context"
	"fmt"
	"reflect"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// Object is a type of the API server's: *corev1.Pod for example.
type Object interface {
	comparable
	metav1.Object
}

// Options configure which objects are watched, and how they are handled.
type Options[T Object] struct {
	// Informer chooses the type of T: informers.SharedInformerFactory.Core().V1().Pods().Informer()
	// for example.
	Informer func(informers.SharedInformerFactory) cache.SharedIndexInformer
	// Namespace, Labels and Fields narrow down what is watched. Empty: everything.
	Namespace, Labels, Fields string
	// Reduce returns the part of an object to keep in memory. Nil: all of it.
	Reduce func(T) T
	// Changed is called for each change of an object, one at a time. was is nil if the object is
	// new; is is nil if it was deleted. If the watch missed the deletion, was may be an old
	// version.
	Changed func(was, is T)
	// Trouble is called when the watch fails. It is not called again for the same error until the
	// watch has delivered an object. May be nil.
	Trouble func(error)
}

// Watch is a watch of the API server. Make it with New, then Run it.
type Watch struct {
	factory  informers.SharedInformerFactory
	informer cache.SharedIndexInformer
	handler  cache.ResourceEventHandlerRegistration
}

// New returns a watch that does nothing until Run.
func New[T Object](kube kubernetes.Interface, o Options[T]) (*Watch, error) {
	options := []informers.SharedInformerOption{
		informers.WithNamespace(o.Namespace),
		informers.WithTweakListOptions(func(list *metav1.ListOptions) {
			list.LabelSelector, list.FieldSelector = o.Labels, o.Fields
		}),
	}
	if o.Reduce != nil {
		options = append(options, informers.WithTransform(func(object any) (any, error) {
			if t, ok := object.(T); ok {
				return o.Reduce(t), nil
			}
			return object, nil
		}))
	}
	w := &Watch{factory: informers.NewSharedInformerFactoryWithOptions(kube, 0, options...)}
	w.informer = o.Informer(w.factory)
	var mu sync.Mutex
	trouble := ""
	var err error
	w.handler, err = w.informer.AddEventHandler(Handler(func(was, is T) {
		mu.Lock()
		trouble = ""
		mu.Unlock()
		o.Changed(was, is)
	}))
	if err == nil && o.Trouble != nil {
		err = w.informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
			mu.Lock()
			known := trouble == err.Error() || ctx.Err() != nil
			trouble = err.Error()
			mu.Unlock()
			if !known {
				o.Trouble(err)
			}
		})
	}
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", reflect.TypeFor[T]().Elem().Name(), err)
	}
	return w, nil
}

// Handler returns a handler of an informer's events that calls changed, see [Options].
func Handler[T Object](changed func(was, is T)) cache.ResourceEventHandler {
	call := func(was, is any) {
		var none T
		before, _ := was.(T)
		after, _ := is.(T)
		if before != none || after != none {
			changed(before, after)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(is any) { call(nil, is) },
		UpdateFunc: func(was, is any) { call(was, is) },
		DeleteFunc: func(was any) {
			if last, missed := was.(cache.DeletedFinalStateUnknown); missed {
				was = last.Obj
			}
			call(was, nil)
		},
	}
}

// Run watches until ctx is done. It returns when all goroutines of the watch have ended.
func (w *Watch) Run(ctx context.Context) error {
	w.factory.Start(ctx.Done())
	<-ctx.Done()
	w.factory.Shutdown()
	return nil
}

// Synced waits until Changed was called for every object of the first list, and returns true. If
// ctx is done first, it returns false.
func (w *Watch) Synced(ctx context.Context) bool {
	return cache.WaitForCacheSync(ctx.Done(), w.handler.HasSynced)
}

// HasSynced reports whether Changed was called for every object of the first list.
func (w *Watch) HasSynced() bool { return w.handler.HasSynced() }

// EndpointSlices is [Options.Informer] for EndpointSlices.
func EndpointSlices(f informers.SharedInformerFactory) cache.SharedIndexInformer {
	return f.Discovery().V1().EndpointSlices().Informer()
}
