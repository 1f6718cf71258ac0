//go:build !lameduckmutation

package main

import "errors"

func brokenRule() int { return 0 }

func mutate(uint64, int) error {
	return errors.New("this build has all its rules: build with -tags lameduckmutation")
}
