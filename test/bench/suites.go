package main

// suites is what there is to measure, in the order to run.
var suites = []suite{
	{"endpoints", endpointsSuite},
	{"health/replace", benchReplace},
	{"health/memory", benchMemory},
	{"health/probe", probeSpeed},
	{"drain", drains},
	{"kubeproxy", kubeProxy},
	{"admission", runAdmission},
	{"kernel", kernelDirects},
}
