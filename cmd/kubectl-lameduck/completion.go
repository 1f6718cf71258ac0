package main

import (
	"fmt"
	"io"
	"strings"
)

// complete is the command by which kubectl asks what may come next.
const complete = "__complete"

var shells = []string{"bash", "zsh", "fish"}

// script is found on the PATH and asked by kubectl's own completion, whatever the shell.
const script = `#!/bin/sh
# kubectl's own completion calls this, in bash, zsh and fish, from the PATH:
#   kubectl lameduck completion bash > ~/.local/bin/kubectl_complete-lameduck
#   chmod +x ~/.local/bin/kubectl_complete-lameduck
exec kubectl-lameduck ` + complete + ` "$@"
`

// completion prints the script, or the words that may stand in the place of the last one, as cobra
// does. :4 says that no file names are meant.
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
