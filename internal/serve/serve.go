// Package serve runs the long-lived parts of a process side by side and stops them in order. It
// also has the HTTP server with limits of the coordinator and the agent.
package serve

import (
	"context"
	"fmt"
	"sync"
)

// Task is a part that runs until its context is done, and then returns nil. Any other return ends
// the whole process.
type Task struct {
	Name string
	Run  func(ctx context.Context) error
	// Last: other tasks need this one until they end. Its context is done only when all tasks that
	// are not Last have returned.
	Last bool
}

// All runs the tasks until ctx is done or one of them returns, then stops the others and waits for
// them: first those that are not Last. It returns the error of the task that ended it, with its
// name, and ignores errors that tasks return after ctx is done.
func All(ctx context.Context, tasks ...Task) error {
	last, cancelLast := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelLast()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var first error
	var ended sync.Once
	var wg, lastWG sync.WaitGroup
	for _, t := range tasks {
		until, group := ctx, &wg
		if t.Last {
			until, group = last, &lastWG
		}
		group.Go(func() {
			err := t.Run(until)
			ended.Do(func() {
				switch {
				case ctx.Err() != nil:
				case err != nil:
					first = fmt.Errorf("%s: %w", t.Name, err)
				default:
					first = fmt.Errorf("%s ended", t.Name)
				}
				cancel()
			})
		})
	}
	// Without tasks, All also waits for ctx.
	<-ctx.Done()
	wg.Wait()
	cancelLast()
	lastWG.Wait()
	return first
}
