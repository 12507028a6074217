package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
)

func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	check := func(want string) {
		t.Helper()
		b, err := os.ReadFile(path)
		st, _ := os.Stat(path)
		list, _ := os.ReadDir(filepath.Dir(path))
		if err != nil || string(b) != want || st.Mode().Perm() != 0o600 || len(list) != 1 {
			t.Errorf("%q %v %v %v", b, err, st.Mode(), list)
		}
	}
	for _, text := range []string{"one", "two"} {
		if err := Write(path, strings.NewReader(text), 0o600); err != nil {
			t.Fatal(err)
		}
		check(text)
	}
	broken := errors.New("broken")
	if err := Write(path, iotest.ErrReader(broken), 0o600); !errors.Is(err, broken) {
		t.Errorf("a failing reader: %v", err)
	}
	check("two")
	if err := Write(path, strings.NewReader("three"), 0o600, func(*os.File) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("a failing preparation: %v", err)
	}
	check("two")
}
