module tandem.test/pause

go 1.26
