//go:build lameduckmutation

package drain

var brokenRule int

// BreakRule switches one rule of the design off, and all others on. It exists only in the build
// that shows that the simulation would notice; 0 switches none off.
func BreakRule(rule int) { brokenRule = rule }
