package demo

import (
	"archive/tar"
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"klimax/guest/facts"
	"klimax/shared/config"
)

func TestWhere(t *testing.T) {
	p, _ := config.Default().Plan()
	at, err := Where(p)
	if err != nil || at.Node.String() != "172.30.99.2" || at.VIP.String() != "172.30.99.200" {
		t.Errorf("%+v %v", at, err)
	}
}

func TestAnswer(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(answer))
	defer srv.Close()
	resp, err := http.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if string(b) != "klimax demo: you are 127.0.0.1, this is 127.0.0.1\n" {
		t.Errorf("%q", b)
	}
}

func TestCheck(t *testing.T) {
	ok := facts.Engine{Known: true, Running: true, Network: facts.DockerNetwork{Found: true}, Clusters: []facts.Cluster{{Name: "demo", Number: 99, Demo: true}, {Name: "dev", Number: 1}}}
	if err := check(ok); err != nil {
		t.Error(err)
	}
	missing := facts.Engine{Known: true, Running: true, Network: facts.DockerNetwork{Reason: "Missing"}}
	if err := check(missing); err != nil {
		t.Error(err)
	}
	for want, e := range map[string]facts.Engine{
		"no engine": {Problem: "no engine"},
		"subnet":    {Known: true, Running: true, Network: facts.DockerNetwork{Reason: "OtherSubnet", Problem: "another subnet"}},
		"taken by":  {Known: true, Running: true, Network: facts.DockerNetwork{Found: true}, Clusters: []facts.Cluster{{Name: "last", Number: 99}}},
	} {
		if err := check(e); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestImage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bin")
	if err := os.WriteFile(file, []byte("ELF"), 0o755); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := writeImage(&b, file); err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(&b)
	h, err := r.Next()
	if err != nil || h.Name != "klimax-guest" || h.Mode != 0o755 {
		t.Errorf("%+v %v", h, err)
	}
	if text, _ := io.ReadAll(r); string(text) != "ELF" {
		t.Errorf("%q", text)
	}
	if _, err := r.Next(); err != io.EOF {
		t.Error("more than the binary is in it")
	}
	if err := writeImage(&b, file+"x"); err == nil {
		t.Error("no binary, no error")
	}
}
