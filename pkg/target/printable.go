package target

import (
	"strings"
	"unicode"
)

// Printable replaces what is not printable in a text from outside by question marks: control
// characters, also those of C1 and those that change the direction of a text, line breaks, and
// invalid UTF-8. An operator's terminal may show any of them as something else. The result is not
// longer.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) && r != unicode.ReplacementChar {
			return r
		}
		return '?'
	}, text)
}
