"""What ``--help`` says. A paragraph after a backspace character keeps its lines as they are."""

from __future__ import annotations

from dubito.cli.methods import METHODS

_LINES_OF_METHODS = "\n              ".join(METHODS)

_EXIT_CODES = """\b
Exit codes:
  0    all is well
  1    something failed on the way, such as a loss that became NaN
  2    bad usage or bad input: an unknown name, an unreadable table
  3    a data set that is not on this machine
  130  interrupted with Ctrl-C; what was finished is kept
"""

_ENVIRONMENT = """\b
Environment:
  DUBITO_DATA  folders with data sets, separated like those of PATH
"""

MAIN = f"""Give a PyTorch network a posterior over its weights, and see what it is worth.

Every method is compared on the same data with the same network: how accurate it is, whether its probabilities can be
trusted, and whether it notices data unlike any it has seen.

\b
Examples:
  dubito demo
  dubito compare --data digits --method "map()" --method "laplace(structure=kron)"
  dubito compare --data houses.csv --target price --seeds 5
  dubito compress --data digits --save digits.dubito
  dubito data list

Results go to stdout, progress and errors to stderr. --debug, anywhere on the line, shows the traceback of an error.

{_EXIT_CODES}
{_ENVIRONMENT}"""

DEMO = f"""Train on handwritten digits, compare every method, and write a report.

The data (1,797 images of 8 x 8 pixels) comes with scikit-learn, so nothing is downloaded. Every method is judged on
held-out digits, on digits under seven corruptions in five severities, and on images that are no digits at all.

\b
Examples:
  dubito demo
  dubito demo --fast --out /tmp/report.html
  dubito demo --json | jq '.summary'

{_EXIT_CODES}"""

COMPARE = f"""Fit several methods on one data set and compare them on its test part.

The data is a name that `dubito data list` shows, or a .csv, .tsv or .parquet table with --target. Methods, networks and
likelihoods are written as calls, `name(option=value, ...)`; words inside need no quotes of their own.

\b
Methods:      {_LINES_OF_METHODS}
Networks:     mlp(hidden, activation), lenet_300_100, lenet5
              resnet20(width, shortcut), resnet18(width)
              transformer(width, depth, heads, dropout)
              lstm(width, embedding, depth, dropout)
Likelihoods:  categorical, bernoulli, gaussian(noise), heteroscedastic

All methods see the same data, the same initial weights and the same settings of training. Those that start from a
trained network share one per seed: that of the first map(...) among the methods, else of map(). Without --epochs a
method trains as long as it does by default, but at least 2,000 steps.

Prints a table of the mean and the standard deviation over seeds, and writes a report that opens in any browser. Ctrl-C
keeps what was finished: the table, the report and the JSON then cover it.

\b
Examples:
  dubito compare --data digits --shifts
  dubito compare --data uci/boston --method "map()" --epochs 200 --seeds 5
  dubito compare --data uci/energy --gap --split 2 --model "mlp(hidden=[50, 50], activation=tanh)"
  dubito compare --data houses.csv --target price --method "map(prior_precision=1)"
  dubito compare --data mnist --limit 5000 --limit-test 2000 --model lenet5 --ood kmnist --ood notmnist
  dubito compare --data mr --model "lstm(width=32)" --json > results.json

{_EXIT_CODES}
{_ENVIRONMENT}"""

COMPRESS = f"""Train a network, find the posterior over its weights, remove what it does not need, and report.

The report says what is left of every layer, how large real files are, how fast the network is, and its scores before
and after; those of the smaller network are measured after writing it to a file and loading it again.

\b
Rules:        log_alpha(3), signal_to_noise(1), model_reduction()
              posterior_damage(0.9), magnitude(0.9), random(0.9): the fraction that goes
              signal_to_noise(max_drop=0.01): the accuracy that may be lost on validation data

\b
Examples:
  dubito compress --data digits --epochs 100
  dubito compress --data digits --method "laplace()" --rule "posterior_damage(0.6)" --structure units --finetune 20
  dubito compress --data houses.csv --target price --save houses.dubito --json

{_EXIT_CODES}
{_ENVIRONMENT}"""

DATA = f"""See which data sets are here, and check their files.

Digits, diabetes and the generated toys are always there. The others are looked for in the folders of DUBITO_DATA, then
in the user's cache.

{_ENVIRONMENT}"""

DATA_LIST = """List every data set by name, with where it was found.

\b
Examples:
  dubito data list
  DUBITO_DATA=~/data dubito data list --json
"""

DATA_CHECK = f"""Read data sets whole and compare them with what they must be.

Checks the numbers of rows, shapes, labels, that every number is finite, and the checksums where a SHA256SUMS file lies
beside the data. Without names, checks every data set that is here. Exits with 1 if anything is wrong.

\b
Examples:
  dubito data check uci/boston mnist
  dubito data check

{_EXIT_CODES}"""
