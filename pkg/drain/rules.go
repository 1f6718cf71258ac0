//go:build !lameduckmutation

package drain

// brokenRule names the rule of the design that is switched off: none. In this build the compiler
// removes all that depends on it.
const brokenRule = 0
