# klimax: `make` alone prints what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help build up down unit cross lint deps vuln labdeps lab test bench clean

export CGO_ENABLED := 0

# The revision is stamped into the binaries where git can tell it. A checkout
# that belongs to somebody else, or none at all, must build too.
ifeq (,$(findstring -buildvcs,$(GOFLAGS)))
export GOFLAGS := $(strip $(GOFLAGS) -buildvcs=$(shell git rev-parse -q --verify HEAD >/dev/null 2>&1 && echo true || echo false))
endif

# An empty VERSION leaves the one in shared/version.
VERSION ?= $(patsubst v%,%,$(shell git describe --tags --match 'v[0-9]*' 2>/dev/null))
LDFLAGS := -s -w $(if $(VERSION),-X klimax/shared/version.Version=$(VERSION))
GOBUILD := go build -trimpath -ldflags '$(LDFLAGS)'

# Packages with tests that need root, namespaces and Docker.
LAB_PACKAGES = $(shell grep -rlE --include='*_test.go' '^//go:build .*\blab\b' cmd guest host provision systemd test | xargs -r -n1 dirname | sort -u | sed 's|^|./|')
# make lab PKG=./guest/network RUN=TestForward
PKG ?= $(LAB_PACKAGES)
RUN ?= .

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/klimax and bin/klimax-guest, static and stripped
	$(GOBUILD) -o bin/ ./cmd/klimax ./cmd/klimax-guest

up: build ## as root: Docker, agent and demo here, reached from a namespace that plays the Mac
	go run ./test/mac up

down: build ## stops what `make up` started, and nothing else
	go run ./test/mac down

unit: ## format, vet and all tests that need neither root nor Docker (seconds)
	@bad=$$(gofmt -l .); [ -z "$$bad" ] || { echo "not formatted, run: gofmt -w $$bad" >&2; exit 1; }
	go vet ./...
	go test ./...

cross: ## vet and build for macOS and for arm64
	GOOS=darwin GOARCH=arm64 go vet ./host/... ./shared/... ./cmd/klimax/...
	GOOS=darwin GOARCH=arm64 $(GOBUILD) -o /dev/null ./cmd/klimax
	GOOS=linux GOARCH=arm64 $(GOBUILD) -o /dev/null ./cmd/klimax-guest

lint: bin/tools/built ## staticcheck, also of lab tests and of the macOS side
	go vet -tags lab ./...
	bin/tools/staticcheck -tags lab ./...
	GOOS=darwin GOARCH=arm64 bin/tools/staticcheck ./host/... ./shared/... ./cmd/klimax/...

deps: ## go.mod is tidy, and docs/dependencies.md is what the binaries are made of
	go mod tidy -diff
	go run ./tools/deps

vuln: bin/tools/built ## known vulnerabilities, where the database answers
	@if out=$$(bin/tools/govulncheck ./cmd/... 2>&1); then \
		echo "$$out" | tail -n 3; \
	elif grep -q '^govulncheck: fetching vulnerabilities' <<<"$$out"; then \
		echo "govulncheck was SKIPPED, its database does not answer: $$out"; \
	else \
		echo "$$out" >&2; exit 1; \
	fi

bin/tools/built: tools/lint/go.mod tools/lint/go.sum
	go build -C tools/lint -o $(CURDIR)/bin/tools/ tool
	@touch $@

labdeps: # what the lab needs from apt, and its own programs, into the cache
	go run ./test/labdeps
	@for need in debootstrap:debootstrap systemd-nspawn:systemd-container; do \
		install="apt-get install -y -q --no-install-recommends $${need#*:}"; \
		type -P "$${need%:*}" >/dev/null || $$install || { apt-get update -q; $$install; }; \
	done

lab: labdeps ## as root: tests with namespaces and their own Docker, all set-ups
	go test -tags lab -count=1 -p 1 -timeout 40m -run '$(RUN)' $(PKG)

test: ## everything that CI runs: as root on a clean clone
	@for part in unit build cross lint deps vuln lab; do \
		echo "== $$part"; start=$$SECONDS; \
		$(MAKE) --no-print-directory $$part; \
		echo "== $$part: $$((SECONDS - start)) s"; \
	done

bench: build labdeps ## as root: the tables of speed and memory
	go run ./test/bench

clean: ## removes bin
	rm -rf bin
