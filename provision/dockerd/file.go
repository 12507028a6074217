package dockerd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"klimax/shared/atomicfile"
)

// File is a JSON object as text, whose members can be changed one by one.
type File struct {
	text    []byte
	open    int // offset behind the opening brace
	members []member
	close   int // offset of the closing brace
}

type member struct {
	key                string
	start, from, until int // of the key's quote; of the value
}

// NotJSONError says that a file is no JSON object. It is left alone then.
type NotJSONError struct {
	Path   string
	Line   int // 0 when unknown
	Reason string
}

func (e *NotJSONError) Error() string {
	at := e.Path
	if e.Line > 0 {
		at = fmt.Sprintf("%s:%d", e.Path, e.Line)
	}
	return at + ": " + e.Reason + "; it was left as it is. Mend it (Docker itself does not start with it) and run the command again"
}

// Parse reads the text of a file. An empty text counts as an empty object, as
// it does for the daemon. path is for errors only.
func Parse(path string, text []byte) (*File, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("{}\n")
	}
	f := &File{text: bytes.Clone(text)}
	if err := f.index(); err != nil {
		e := &NotJSONError{Path: path, Reason: err.Error()}
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			e.Line = 1 + bytes.Count(text[:min(int(syntax.Offset), len(text))], []byte("\n"))
		}
		return nil, e
	}
	return f, nil
}

// index finds the members' places in the text.
func (f *File) index() error {
	f.members = nil
	var whole any
	if err := json.Unmarshal(f.text, &whole); err != nil {
		return err
	}
	if _, ok := whole.(map[string]any); !ok {
		return errors.New("not a JSON object")
	}
	d := json.NewDecoder(bytes.NewReader(f.text))
	if _, err := d.Token(); err != nil {
		return err
	}
	f.open = int(d.InputOffset())
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		m := member{key: key.(string)}
		m.start = int(d.InputOffset()) - quoted(f.text[:d.InputOffset()])
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return err
		}
		m.until = int(d.InputOffset())
		m.from = m.until - len(value)
		f.members = append(f.members, m)
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	f.close = int(d.InputOffset()) - 1
	return nil
}

// quoted returns the length of the string literal that text ends with.
func quoted(text []byte) int {
	for i := len(text) - 2; i >= 0; i-- {
		if text[i] != '"' {
			continue
		}
		backslashes := 0
		for j := i - 1; j >= 0 && text[j] == '\\'; j-- {
			backslashes++
		}
		if backslashes%2 == 0 {
			return len(text) - i
		}
	}
	return len(text)
}

// find returns the index of the member that counts for key, the last one of
// its name as for the daemon, and -1 when there is none.
func (f *File) find(key string) int {
	for i, m := range slices.Backward(f.members) {
		if m.key == key {
			return i
		}
	}
	return -1
}

// Get returns a member's value.
func (f *File) Get(key string) (json.RawMessage, bool) {
	i := f.find(key)
	if i < 0 {
		return nil, false
	}
	return bytes.Clone(f.text[f.members[i].from:f.members[i].until]), true
}

// Set gives a member a value, and puts it behind the others if it is new.
func (f *File) Set(key string, value json.RawMessage) error {
	if i := f.find(key); i >= 0 {
		return f.replace(f.members[i].from, f.members[i].until, string(value))
	}
	name, err := json.Marshal(key)
	if err != nil {
		return err
	}
	text := string(name) + ": " + string(value)
	if len(f.members) == 0 {
		return f.replace(f.open, f.close, "\n  "+text+"\n")
	}
	// As the first member is set off from its brace, so is the new one from its neighbour.
	gap := string(f.text[f.open:f.members[0].start])
	if gap == "" {
		gap = " "
	}
	end := f.members[len(f.members)-1].until
	return f.replace(end, end, ","+gap+text)
}

// Unset removes all members of that name.
func (f *File) Unset(key string) error {
	for {
		i := f.find(key)
		var err error
		switch {
		case i < 0:
			return nil
		case len(f.members) == 1:
			err = f.replace(f.open, f.close, "")
		case i == 0:
			err = f.replace(f.members[0].start, f.members[1].start, "")
		default:
			err = f.replace(f.members[i-1].until, f.members[i].until, "")
		}
		if err != nil {
			return err
		}
	}
}

func (f *File) replace(from, until int, with string) error {
	f.text = slices.Concat(f.text[:from], []byte(with), f.text[until:])
	return f.index()
}

// Empty reports whether the object has no members.
func (f *File) Empty() bool { return len(f.members) == 0 }

// Bytes is the text.
func (f *File) Bytes() []byte { return bytes.Clone(f.text) }

// Read reads the file at path. One that does not exist is an empty object;
// exists tells.
func Read(path string) (f *File, exists bool, err error) {
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f, err = Parse(path, nil)
		return f, false, err
	case err != nil:
		return nil, false, err
	}
	f, err = Parse(path, text)
	return f, true, err
}

// Write replaces the file at path in one step: a crash leaves the old or the
// new text, never a part. A file that was there keeps its owner and mode, a
// new one gets 0644; a link keeps pointing where it does. Its directory must exist.
func (f *File) Write(path string) error {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	mode, uid, gid := fs.FileMode(0o644), -1, -1
	if old, err := os.Stat(path); err == nil {
		mode = old.Mode().Perm()
		if s, ok := old.Sys().(*syscall.Stat_t); ok {
			uid, gid = int(s.Uid), int(s.Gid)
		}
	}
	keepOwner := func(t *os.File) error {
		if uid < 0 {
			return nil
		}
		return t.Chown(uid, gid)
	}
	return atomicfile.Write(path, bytes.NewReader(f.text), mode, keepOwner)
}
