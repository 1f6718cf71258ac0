package serve

import "fmt"

// Refusal is an error with the HTTP status of the answer.
type Refusal struct {
	Code int
	Text string
}

func (r Refusal) Error() string { return r.Text }

// Refuse returns a Refusal whose text is formatted as by fmt.Sprintf.
func Refuse(code int, format string, args ...any) error {
	return Refusal{code, fmt.Sprintf(format, args...)}
}
