package main

// suites is what there is to measure, in the order to run.
var suites = []suite{
	{"admission", runAdmission},
}
