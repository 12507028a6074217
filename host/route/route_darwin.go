package route

func newKernel(r Runner) kernel { return bsdKernel{run: r} }
