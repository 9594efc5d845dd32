"""The texts of ``--help``. A paragraph after a backspace character is not re-wrapped."""

from dubito.cli.methods import METHODS

_LINES_OF_METHODS = "\n              ".join(METHODS)

_EXIT_CODES = """\b
Exit codes:
  0    success
  1    a computation failed (a loss became NaN, say), or a run was written whose predictions cannot be trusted
  2    wrong usage or input, for example an unknown name or an unreadable table
  3    a file or a data set was not found on this machine
  130  interrupted with Ctrl-C; finished results are kept
"""

_ENVIRONMENT = """\b
Environment:
  DUBITO_DATA  folders that contain data sets, separated like PATH
"""

MAIN = f"""Find out how far to trust each prediction of a PyTorch network.

`fit` learns from a table and writes a folder, a run; `predict` adds predictions with their uncertainty to the rows of
another table. `compare` shows all methods on the same data: how accurate they are, how well their probabilities are
calibrated, and whether they flag unfamiliar data.

\b
Examples:
  dubito fit houses.csv --target price -o houses/
  dubito predict houses/ new.csv -o out.csv
  dubito explain houses/ new.csv --row 17
  dubito compare --data houses.csv --target price --seeds 5
  dubito demo

Results go to stdout, progress and errors to stderr. At any position, --quiet leaves out notes and progress, and --debug
shows the traceback of an error.

{_EXIT_CODES}
{_ENVIRONMENT}"""

_TABLES = """TABLE is a .csv or .tsv file (also gzipped), a .parquet or .xlsx file, or - for standard input. It may also
be pictures: a folder with one folder per class, an .npz file of images and labels, a data set by name such as digits.
How a text file is written is found out; --sep, --encoding and --decimal say it where that fails."""

FIT = f"""Learn to predict a column of a table, and write everything that predicting needs to a folder.

{_TABLES}

What was understood of each column is printed first. Then a network is trained on most of the rows, and its posterior is
found. A fifth of the rows is held out: they score the predictions, set the width of intervals, and set the threshold of
the decision to answer or to ask. An interrupted fit continues when the same command is given again.

--risk is the largest error rate of answers; if the target is a number, their mean absolute error in its own units.
Without it only unfamiliar rows are to be asked about.

The folder RUN holds run.json (settings), encoder.json, posterior.safetensors, calibration.safetensors, rows.safetensors
(rows that were not trained on, and some that were), scores.json and report.html.

\b
Examples:
  dubito fit houses.csv --target price -o houses/
  dubito fit mail.csv --target spam -o mail/ --risk 0.02 --ignore sender
  dubito fit houses.csv --target price -o houses/ --method "ensemble()" --model "mlp(hidden=[100, 100])"
  dubito fit houses.csv --target price -o houses/ --model net.py:build --weights w.safetensors
  dubito fit digits -o digits/
  dubito fit --config houses.yaml

{_EXIT_CODES}"""

PREDICT = f"""Predict the rows of a table with a run that `dubito fit` wrote.

{_TABLES}

\b
The rows are kept, and columns are added:
  prediction            the most probable class, or the mean
  stddev, lower, upper  numbers: the standard deviation, and an interval that holds the truth in 90 % of cases
  confidence, p_CLASS   classes: the largest probability, and the probability of each class
  epistemic, aleatoric  the two parts of the uncertainty (variances of numbers, entropies of classes)
  unfamiliar            the share of held-out rows that were more familiar than this one
  decision              answer or ask, at the stated risk; unfamiliar rows (0.99 and above) are always asked about

Rows are read, predicted and written in chunks, so the table may be larger than the memory.

\b
Examples:
  dubito predict houses/ new.csv -o out.csv
  dubito predict mail/ new.csv -o out.parquet --risk 0.01
  zcat big.csv.gz | dubito predict houses/ - -o - > out.csv

{_EXIT_CODES}"""

EVALUATE = f"""Score the predictions of a run for rows whose target is known, in original units.

{_TABLES}

\b
Examples:
  dubito evaluate houses/ sold.csv
  dubito evaluate houses/ sold.csv --report sold.html --json

{_EXIT_CODES}"""

UPDATE = f"""Learn from more rows: the posterior of the run is the prior for them.

{_TABLES}

A fifth of the new rows joins the held-out rows, on which intervals and decisions are calibrated anew. The encoder
stays: a category that the first rows did not have is still unseen. Without -o the run is replaced.

\b
Examples:
  dubito update houses/ march.csv
  dubito update houses/ march.csv -o houses-march/

{_EXIT_CODES}"""

EXPLAIN = f"""Say which columns made the prediction of a row uncertain.

The uncertainty of the row is compared with that of held-out rows, and the difference is divided among the columns
(Shapley values). Rows are counted from 1. Without a TABLE the row is taken from the table of the fit.

\b
Examples:
  dubito explain houses/ --row 17
  dubito explain houses/ new.csv --row 3 --json

{_EXIT_CODES}"""

REPORT = f"""Compare runs by their scores on held-out rows, in a table and in a report that opens in any browser.

\b
Examples:
  dubito report houses/ houses-ensemble/
  dubito report houses/ houses-ensemble/ --out comparison.html

{_EXIT_CODES}"""

DOCTOR = f"""Look for what may be wrong with a run, or without one, with the installation.

A run's files are read and checked, its held-out rows are predicted again, and its intervals and decisions are looked
at. Exits with 1 if there is a problem.

\b
Examples:
  dubito doctor
  dubito doctor houses/

{_EXIT_CODES}"""

EXPORT = f"""Write the network of a run for other programs, as ONNX (checked with onnxruntime) or with torch.export.

Its inputs are the features that encoder.json of the run describes.

\b
Examples:
  dubito export houses/ -o houses.onnx

{_EXIT_CODES}"""

SERVE = f"""Answer requests for predictions over HTTP, with a JSON API that /openapi.json describes.

\b
Paths:
  POST /predict      {{"rows": [{{"size": 120, "town": "Ulm"}}]}}; gives the columns of `dubito predict` for each row
  GET /health        whether the server works
  GET /metrics       counts for Prometheus
  GET /openapi.json  the description of all of them

Requests that come at the same time are predicted together. The server listens on this machine alone unless --host says
otherwise. If the environment variable DUBITO_TOKEN is set, requests must bring it. SIGTERM and Ctrl-C stop the server
when the requests in flight are answered. Needs pip install 'dubito[serve]'.

\b
Examples:
  dubito serve houses/
  dubito serve houses/ --port 9000 --risk 20000
  DUBITO_TOKEN=$(openssl rand -hex 16) dubito serve houses/ --host 0.0.0.0

{_EXIT_CODES}"""

PLAY = f"""Serve one page on this machine: move the sliders of a row, and see what is predicted.

The plain network and the posterior answer side by side, with the two parts of the uncertainty, what happens if a column
changes, and the nearest training rows. Columns that are the pixels of a picture (pixel_0_0, pixel_0_1, ... or pixel0,
pixel1, ...) become a canvas to draw on. The address that is printed holds a token, without which nothing is answered.
Needs pip install 'dubito[serve]'.

\b
Examples:
  dubito play houses/
  dubito play houses/ --port 9000

{_EXIT_CODES}"""

LIST_METHODS = """List the methods, as --method of `fit` and `compare` takes them, and what each does.

\b
Examples:
  dubito methods
"""

DEMO = f"""Show on handwritten digits what a posterior is good for, compare every method, and write a report.

One network is trained, and gets a posterior. Then it is told in words and pictures: what the two say about letters and
about turned and scrambled digits; how many errors are avoided when one picture in ten may be refused; calibration
before and after; the same network at a twentieth of its size. A table compares all methods, the best first. The data
(1,797 images of 8 x 8 pixels) come with scikit-learn, so nothing is downloaded. The split changes with --seed.

\b
Examples:
  dubito demo
  dubito demo --fast --out /tmp/report.html
  dubito demo --seed 3
  dubito demo --json | jq '.summary'

{_EXIT_CODES}"""

COMPARE = f"""Fit several methods to one data set and compare them on its test part.

--data is a name that `dubito data list` shows, or a table with --target: .csv, .tsv, .parquet, .xlsx, or - for standard
input. How a text file is written is found out; --sep, --encoding and --decimal say it where that fails. Methods,
networks and likelihoods are written as calls, `name(option=value, ...)`; text values need no quotes.

\b
Methods:      {_LINES_OF_METHODS}
Networks:     mlp(hidden, activation), lenet_300_100, lenet5
              resnet20(width, shortcut), resnet18(width)
              transformer(width, depth, heads, dropout)
              lstm(width, embedding, depth, dropout)
Likelihoods:  categorical, bernoulli, gaussian(noise), heteroscedastic

All methods use the same data, initial weights and training settings. Methods that need a trained network reuse the
result of the first map(...), or of map() if none is listed. Without --epochs the number of
epochs is found on held-out examples.

Prints the mean and standard deviation over seeds, and writes a report that opens in any browser. After Ctrl-C the
table, the report and the JSON contain the finished results.

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

COMPRESS = f"""Make a network smaller: remove the weights or units that its posterior shows to be unneeded, and report.

With a RUN of `dubito fit`, the smaller network gets a posterior of its own, and a new run is written. --at-most is what
it may cost on the rows that were trained on: accuracy, or for numbers the growth of the root mean squared error as a
share of itself. The scores of the new run are those of the held-out rows.
The table of the run is read again; --data gives its place if it has moved.
--explore measures twenty smaller networks instead and draws their size, time, error and calibration in a page; --pick 7
makes one of them. --save writes a run as one file, which `dubito predict` and the others read like the folder.

With --data alone a network is trained first, by default with variational(prior=priors.LogUniform(), kl_warmup=0.5). The
report gives the remaining size of every layer, the size of real files, the speed, and the scores before and after in
original units; the compressed network is measured after saving and loading it.

\b
Rules:        log_alpha(3), signal_to_noise(1), model_reduction()
              posterior_damage(0.9), magnitude(0.9), random(0.9): the fraction of weights to remove
              signal_to_noise(max_drop=0.01): the loss of accuracy allowed on validation data

\b
Examples:
  dubito compress houses/ --at-most 0.5% -o small/
  dubito compress houses/ --explore
  dubito compress houses/ --pick 7 -o small/ --save small.dubito
  dubito compress --data digits --epochs 100
  dubito compress --data digits --method "laplace()" --rule "posterior_damage(0.6)" --structure units --finetune 20
  dubito compress --data houses.csv --target price --save houses.dubito --json

{_EXIT_CODES}
{_ENVIRONMENT}"""

DATA = f"""List the available data sets, check their files, and describe tables.

Digits, diabetes and the generated toys are always available. The files of all others are searched in the folders of
DUBITO_DATA, then in the user's cache.

{_ENVIRONMENT}"""

DATA_LIST = """List all data sets and where each was found.

\b
Examples:
  dubito data list
  DUBITO_DATA=~/data dubito data list --json
"""

DATA_DESCRIBE = f"""Say what is understood of each column of a table, as `fit` and `compare` understand it.

Prints the type, missing cells, levels and range of every column, and which columns would be left out and why.

\b
Examples:
  dubito data describe houses.csv
  dubito data describe houses.csv --target price --ignore agent --decimal ,

{_EXIT_CODES}"""

DATA_CHECK = f"""Read data sets completely and check them.

Checks the numbers of rows, shapes, labels, that every number is finite, and the checksums where a SHA256SUMS file lies
beside the data. Without names, checks every data set that was found. Exits with 1 if anything is wrong.

\b
Examples:
  dubito data check uci/boston mnist
  dubito data check

{_EXIT_CODES}"""
