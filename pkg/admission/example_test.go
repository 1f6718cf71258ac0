package admission_test

import (
	"fmt"

	"github.com/lameduck-io/lameduck/pkg/admission"
)

// The decision is a pure function of facts: the first row of the table that matches.
func ExampleDecide() {
	running := admission.Facts{
		Operation: admission.Delete, Listed: true, Ready: true, Agents: 2, CouldRoute: true,
	}
	fmt.Println(admission.Decide(running).Action)

	dryRun := running
	dryRun.DryRun = true
	v := admission.Decide(dryRun)
	fmt.Println(v.Action, v.Reason)
	// Output:
	// drain
	// allow DryRun
}
