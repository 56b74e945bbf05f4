// Command pause holds a pod's namespaces open and reaps what its processes leave behind.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGINT, syscall.SIGTERM)
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	for {
		select {
		case <-ends:
			return
		case <-children:
			for {
				if reaped, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); reaped <= 0 || err != nil {
					break
				}
			}
		}
	}
}
