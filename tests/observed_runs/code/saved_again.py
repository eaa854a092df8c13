from tiny import *

save(*load())
