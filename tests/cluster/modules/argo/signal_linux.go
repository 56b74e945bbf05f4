// Package osspecific: the functions for Linux that the published archive of Argo Workflows v4.0.5 does not hold.
package osspecific

import (
	"errors"
	"os"
	"syscall"

	status "github.com/argoproj/argo-workflows/v4/util/errors"
)

// Term asks a process to end.
var Term = syscall.SIGTERM

// CanIgnoreSignal says whether a signal is the runtime's own business and not the command's.
func CanIgnoreSignal(signal os.Signal) bool {
	switch signal {
	case syscall.SIGCHLD, syscall.SIGURG:
		return true
	}
	return false
}

// Setpgid has the command start in a process group of its own, so that Kill reaches its children.
func Setpgid(attributes *syscall.SysProcAttr) { attributes.Setpgid = true }

// Kill signals the process group of a process, or the process alone where its group cannot be told.
func Kill(pid int, signal syscall.Signal) error {
	target := pid
	if group, err := syscall.Getpgid(pid); err == nil {
		target = -group
	}
	return syscall.Kill(target, signal)
}

// Wait reaps every child until the given one has ended, and returns its status as an error with an exit code.
// The executor is the first process of its container, so orphans of the command become its children too.
func Wait(process *os.Process) error {
	awaited := process.Pid
	if err := process.Release(); err != nil {
		return err
	}
	for {
		var ended syscall.WaitStatus
		reaped, err := syscall.Wait4(-1, &ended, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if reaped != awaited {
			continue
		}
		if ended.Signaled() {
			return status.NewExitErr(128 + int(ended.Signal()))
		}
		return status.NewExitErr(ended.ExitStatus())
	}
}
