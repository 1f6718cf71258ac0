package main

import (
	"fmt"
	"io"
	"strings"
)

// complete is the command that kubectl's shell completion calls to get the possible next words.
const complete = "__complete"

var shells = []string{"bash", "zsh", "fish"}

// script is the file that kubectl's own completion finds on the PATH and calls, in every shell.
const script = `#!/bin/sh
# kubectl's own completion calls this, in bash, zsh and fish, from the PATH:
#   kubectl lameduck completion bash > ~/.local/bin/kubectl_complete-lameduck
#   chmod +x ~/.local/bin/kubectl_complete-lameduck
exec kubectl-lameduck ` + complete + ` "$@"
`

// completion prints the script or, for the command complete, the words that the last one may
// become. The output is in cobra's format: the directive :4 switches the completion of file names
// off.
func completion(o options, out io.Writer) error {
	if o.command != complete {
		_, err := io.WriteString(out, script)
		return err
	}
	if len(o.words) == 1 {
		for _, word := range commands {
			if strings.HasPrefix(word, o.words[0]) {
				fmt.Fprintln(out, word)
			}
		}
	}
	_, err := fmt.Fprintln(out, ":4")
	return err
}
